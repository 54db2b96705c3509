"""Updates as the run sees them: versions on disk, resuming, damage, a full disk, the token account of each rollout."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_policy
import torch
from safetensors.torch import load_file
from tiny_policy import light_process  # noqa: F401 - an autouse fixture

from sesa.config import ProposerSection, RunConfig, SamplingSection, SolverSection, TrainingSection, load_config
from sesa.errors import ConfigError, DataError, StorageFullError
from sesa.training import checkpoints
from sesa.training.grpo import RolloutTrainer
from sesa.training.updater import GrpoUpdater, load_policy
from sesa.types import PolicyVersion, Rollout, StopReason

CONFIG = RunConfig(
    solver=SolverSection(sampling=SamplingSection(temperature=0.8, max_tokens=16), max_turns=3),
    training=TrainingSection(learning_rate=1e-3, keep_versions=2, micro_batch=3),
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> PolicyVersion:
    folder = tiny_policy.write_tiny_model(tmp_path_factory.mktemp("base"))
    return PolicyVersion(policy="solver", version=0, path=str(folder))


def groups(base: PolicyVersion, seed: int = 0) -> list[list[Rollout]]:
    """Two groups of three rollouts of two turns, sampled from ``base``; the third group has no variance."""
    model = tiny_policy.load(Path(base.path))
    return [
        [
            tiny_policy.sampled_rollout(
                model,
                f"v{base.version}-{seed}-{g}-{k}",
                float(k == 0) if g < 2 else 1.0,
                prompt=range(3, 9 + g),
                replies=(3, 2 + k),
                temperature=0.8,
                version=base.version,
                seed=100 * seed + 10 * g + k,
            )
            for k in range(3)
        ]
        for g in range(3)
    ]


def test_an_update_writes_a_version_that_is_whole_and_served_like_its_base(base: PolicyVersion, tmp_path: Path) -> None:
    result = GrpoUpdater(CONFIG, tmp_path).update("solver", 4, groups(base), base)
    version = result.version
    assert version is not None
    folder = tmp_path / "weights/solver/v0001"
    assert version == PolicyVersion(policy="solver", version=1, path=str(folder), step=4, sha256=version.sha256)
    assert len(version.sha256) == 64
    manifest = checkpoints.read_manifest(folder)
    assert manifest is not None
    assert checkpoints.damage(folder, manifest) is None
    assert manifest.stats == result.stats
    assert (manifest.base_version, manifest.reference) == (0, base.path)
    # Everything but the weights is the base's, byte for byte; every tensor has its old name and shape.
    for source in Path(base.path).iterdir():
        if source.suffix != ".safetensors":
            assert (folder / source.name).read_bytes() == source.read_bytes()
    old, new = load_file(Path(base.path) / "model.safetensors"), load_file(folder / "model.safetensors")
    assert {n: t.shape for n, t in old.items()} == {n: t.shape for n, t in new.items()}
    assert any(not torch.equal(old[n], new[n]) for n in old)
    assert not [path for path in folder.parent.iterdir() if path.name.startswith(".")]


def test_the_token_account_of_every_rollout(base: PolicyVersion, tmp_path: Path) -> None:
    batch = groups(base)
    lost = tiny_policy.rollout("lost", [tiny_policy.call([3], [4])], 0.0, StopReason.BACKEND_ERROR)
    batch[0].append(lost)
    result = GrpoUpdater(CONFIG, tmp_path).update("solver", 1, batch, base)
    rows = {row.rollout_id: row for row in result.trained}
    assert set(rows) == {r.id for group in batch for r in group}
    for rollout in (r for group in batch[:2] for r in group if r is not lost):
        row = rows[rollout.id]
        assert row.trained_tokens == row.sampled_tokens == rollout.sampled_tokens > 0
        assert (row.dropped, row.sequences, row.version, row.step) == (None, 1, 1, 1)
        assert row.advantage is not None
    for rollout in batch[2]:
        row = rows[rollout.id]
        assert (row.dropped, row.trained_tokens, row.advantage) == ("zero_variance", 0, None)
        assert row.sampled_tokens > 0
    assert rows["lost"].dropped == "backend_error"
    stats = result.stats
    assert stats.dropped == {"zero_variance": 1, "backend_error": 1}
    assert stats.groups == 2
    assert stats.sequences == 6
    assert stats.trained_tokens == stats.sampled_tokens == sum(r.trained_tokens for r in result.trained)
    assert stats.ratio_mean == pytest.approx(1, abs=1e-4)
    assert stats.loss is not None
    assert stats.grad_norm is not None
    assert stats.grad_norm > 0


def test_nothing_to_train_on_makes_no_version(base: PolicyVersion, tmp_path: Path) -> None:
    result = GrpoUpdater(CONFIG, tmp_path).update("solver", 1, groups(base)[2:], base)
    assert result.version is None
    assert result.stats.version == 0
    assert result.stats.loss is None
    assert {row.dropped for row in result.trained} == {"zero_variance"}
    assert not (tmp_path / "weights").exists()
    assert GrpoUpdater(CONFIG, tmp_path).update("solver", 1, [], base).trained == ()


def test_same_inputs_same_weights_and_memory_equals_disk(base: PolicyVersion, tmp_path: Path) -> None:
    """Two updates by one updater, and by one that is restarted in between, end in the same bytes."""
    kept = GrpoUpdater(CONFIG, tmp_path / "a")
    first = kept.update("solver", 1, groups(base), base).version
    assert first is not None
    second = kept.update("solver", 2, groups(first), first).version
    fresh = GrpoUpdater(CONFIG, tmp_path / "b").update("solver", 1, groups(base), base).version
    assert fresh is not None
    again = GrpoUpdater(CONFIG, tmp_path / "b").update("solver", 2, groups(fresh), fresh).version
    assert second is not None
    assert again is not None
    assert (first.sha256, second.sha256) == (fresh.sha256, again.sha256)
    assert first.sha256 != second.sha256


def test_policies_do_not_touch_each_other(base: PolicyVersion, tmp_path: Path) -> None:
    updater = GrpoUpdater(
        CONFIG.model_copy(update={"proposer": ProposerSection(sampling=CONFIG.solver.sampling, max_turns=3)}), tmp_path
    )
    alone = GrpoUpdater(CONFIG, tmp_path / "alone")
    solver = updater.update("solver", 1, groups(base), base).version
    proposer_base = base.model_copy(update={"policy": "proposer"})
    proposer = updater.update("proposer", 1, groups(base, seed=5), proposer_base).version
    assert solver is not None
    assert proposer is not None
    assert Path(proposer.path).parent.name == "proposer"
    after = updater.update("solver", 2, groups(solver), solver).version
    first = alone.update("solver", 1, groups(base), base).version
    assert after is not None
    assert first is not None
    expected = alone.update("solver", 2, groups(first), first).version
    assert expected is not None
    assert after.sha256 == expected.sha256


@pytest.mark.parametrize(("free", "kept"), [(2**40, {"proposer", "solver"}), (2**20, {"solver"})])
def test_what_the_container_has_left_decides_whether_both_policies_stay_in_memory(
    base: PolicyVersion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, kept: set[str]
) -> None:
    monkeypatch.setattr("sesa.machine._number", {"memory.max": 2**41, "memory.current": 2**41 - free}.get)
    monkeypatch.setattr("sesa.machine._inactive_file", lambda: 0)
    monkeypatch.setattr("sesa.machine.psutil.virtual_memory", lambda: SimpleNamespace(total=2**42, available=2**42))
    updater = GrpoUpdater(CONFIG, tmp_path)
    for policy in ("proposer", "solver"):
        updater.update(policy, 1, groups(base), base.model_copy(update={"policy": policy}))
    assert set(updater._held) == kept


def test_a_version_written_before_is_adopted_without_training(
    base: PolicyVersion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = GrpoUpdater(CONFIG, tmp_path).update("solver", 1, groups(base), base)
    monkeypatch.setattr(RolloutTrainer, "update", lambda *_: pytest.fail("trained again"))
    assert GrpoUpdater(CONFIG, tmp_path).update("solver", 1, groups(base), base) == before


@pytest.mark.parametrize("harm", ["flip", "truncate", "no manifest", "torn manifest", "no optimizer", "other batch"])
def test_a_damaged_or_foreign_version_is_replaced(base: PolicyVersion, tmp_path: Path, harm: str) -> None:
    updater = GrpoUpdater(CONFIG, tmp_path)
    whole = updater.update("solver", 1, groups(base, seed=1 if harm == "other batch" else 0), base).version
    assert whole is not None
    folder = Path(whole.path)
    weights, manifest = folder / "model.safetensors", folder / "manifest.json"
    if harm == "flip":
        raw = bytearray(weights.read_bytes())
        raw[-3] ^= 1
        weights.write_bytes(raw)
    elif harm == "truncate":
        os.truncate(weights, 1000)
    elif harm == "no manifest":
        manifest.unlink()
    elif harm == "torn manifest":
        manifest.write_text(manifest.read_text()[:50])
    elif harm == "no optimizer":
        (folder / "optimizer.pt").unlink()
    result = GrpoUpdater(CONFIG, tmp_path).update("solver", 1, groups(base), base).version
    expected = GrpoUpdater(CONFIG, tmp_path / "fresh").update("solver", 1, groups(base), base).version
    assert result is not None
    assert expected is not None
    assert result.sha256 == expected.sha256
    found = checkpoints.read_manifest(folder)
    assert found is not None
    assert checkpoints.damage(folder, found) is None
    assert [path.name for path in folder.parent.iterdir()] == ["v0001"]


def test_damaged_base_weights_are_named(base: PolicyVersion, tmp_path: Path) -> None:
    version = GrpoUpdater(CONFIG, tmp_path).update("solver", 1, groups(base), base).version
    assert version is not None
    batch = groups(version)
    os.truncate(Path(version.path) / "model.safetensors", 1000)
    with pytest.raises(DataError, match=r"v0001/model\.safetensors does not match .* go back to an earlier one"):
        GrpoUpdater(CONFIG, tmp_path).update("solver", 2, batch, version)
    gone = version.model_copy(update={"path": str(tmp_path / "nowhere"), "sha256": "0" * 64})
    with pytest.raises(DataError, match="nowhere: the weights of solver version 1 are missing"):
        GrpoUpdater(CONFIG, tmp_path).update("solver", 2, batch, gone)
    other = version.model_copy(update={"sha256": "0" * 64})
    with pytest.raises(DataError, match="holds other weights"):
        GrpoUpdater(CONFIG, tmp_path).update("solver", 2, batch, other)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a model that can be trained") as caught:
        load_policy(tmp_path)
    assert "\n" not in str(caught.value)


def test_an_update_that_is_not_finite_keeps_the_weights_and_says_so(
    base: PolicyVersion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updater = GrpoUpdater(CONFIG, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("sesa.training.advantages.STD_EPSILON", float("nan"))
        result = updater.update("solver", 1, groups(base), base)
    assert result.version is None
    assert result.stats.dropped == {"zero_variance": 1, "not_finite": 6}
    assert result.stats.trained_tokens == 0
    assert {row.dropped for row in result.trained} == {"zero_variance", "not_finite"}
    # and the next update starts from clean weights
    assert updater.update("solver", 2, groups(base), base).version is not None


def test_prune_keeps_the_newest_and_the_protected(base: PolicyVersion, tmp_path: Path) -> None:
    updater = GrpoUpdater(CONFIG, tmp_path)  # keeps two
    current = base
    for step in range(1, 6):
        version = updater.update("solver", step, groups(current), current).version
        assert version is not None
        current = version
    folder = tmp_path / "weights/solver"
    (folder / ".v0009.tmp-1").mkdir()
    assert updater.prune("solver", protect=[2]) == [1, 3]
    assert sorted(path.name for path in folder.iterdir()) == ["v0002", "v0004", "v0005"]
    assert not (folder / "v0002/optimizer.pt").exists()
    assert (folder / "v0004/optimizer.pt").exists()
    # An older version without optimizer state can still be trained from.
    v2 = PolicyVersion(policy="solver", version=2, path=str(folder / "v0002"), step=2)
    assert GrpoUpdater(CONFIG, tmp_path / "other").update("solver", 9, groups(v2), v2).version is not None
    assert updater.prune("proposer") == []


@pytest.fixture
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of the size given as parameter."""
    target = tmp_path / "disk"
    target.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", str(target)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield target
    subprocess.run(["umount", "--lazy", str(target)], check=True)


@pytest.mark.parametrize(
    ("small_disk", "checked"),
    # A version takes about 0.8 MB, a third of it weights: seen before the step, while safetensors or while torch writes
    [("1m", True), ("128k", False), ("512k", False)],
    indirect=["small_disk"],
)
def test_a_full_disk_is_one_line_and_leaves_nothing(
    base: PolicyVersion, small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: bool
) -> None:
    updater = GrpoUpdater(CONFIG, small_disk)
    if not checked:  # the disk fills up only while the version is written
        monkeypatch.setattr(checkpoints, "require_space", lambda *_: None)
    with pytest.raises(StorageFullError, match="free some") as caught:
        updater.update("solver", 1, groups(base), base)
    assert "\n" not in str(caught.value)
    assert not (small_disk / "weights/solver").exists() or not list((small_disk / "weights/solver").iterdir())
    # With room again, the same update has the result it would have had.
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    version = updater.update("solver", 1, groups(base), base).version
    expected = GrpoUpdater(CONFIG, tmp_path / "roomy").update("solver", 1, groups(base), base).version
    assert version is not None
    assert expected is not None
    assert version.sha256 == expected.sha256


_KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_updater as t
from sesa.types import PolicyVersion
base = PolicyVersion(policy="solver", version=0, path=sys.argv[2])
original = t.checkpoints.sha256
def slow(path):  # hold the write open, with the temporary folder full of files
    if path.parent.name.startswith("."):
        Path(sys.argv[3], "writing").touch()
        t.time.sleep(600)
    return original(path)
t.torch.set_num_threads(1)
t.checkpoints.sha256 = slow
t.GrpoUpdater(t.CONFIG, Path(sys.argv[3])).update("solver", 1, t.groups(base), base)
"""


def test_kill_9_while_writing_leaves_nothing_that_counts(base: PolicyVersion, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _KILLED, str(Path(__file__).parent), base.path, str(run)]
    )
    try:
        limit = time.monotonic() + 300
        while not (run / "writing").exists():
            assert child.poll() is None, "the update ended before it was killed"
            assert time.monotonic() < limit
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGKILL)
        child.wait()
    weights = run / "weights/solver"
    (left,) = weights.iterdir()
    assert left.name.startswith(".v0001.tmp-")
    assert (left / "model.safetensors").exists()
    version = GrpoUpdater(CONFIG, run).update("solver", 1, groups(base), base).version
    expected = GrpoUpdater(CONFIG, tmp_path / "quiet").update("solver", 1, groups(base), base).version
    assert version is not None
    assert expected is not None
    assert version.sha256 == expected.sha256
    assert [path.name for path in weights.iterdir()] == ["v0001"]


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("serving.layout", "lora", "serving.layout"),
        ("model.dtype", "float16", "model.dtype"),
        ("solver.sampling.top_p", "0.9", "solver.sampling.top_p"),
        ("proposer.sampling.temperature", "0", "proposer.sampling.temperature"),
    ],
)
def test_settings_that_cannot_be_trained_with_are_refused(tmp_path: Path, key: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        GrpoUpdater(load_config(overrides={key: value}), tmp_path)
    assert "\n" not in str(caught.value)
