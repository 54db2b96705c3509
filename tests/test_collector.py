"""The collector's settings hold inside and come back afterwards."""

from __future__ import annotations

import gc

import pytest

from sesa.collector import YOUNG_OBJECTS, rare_collections


def test_settings_hold_inside_and_come_back() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    with rare_collections():
        assert gc.get_threshold() == (YOUNG_OBJECTS, *before[1:])
        assert gc.get_freeze_count() > frozen
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_settings_come_back_after_an_error() -> None:
    before = gc.get_threshold()
    with pytest.raises(RuntimeError), rare_collections():
        raise RuntimeError
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
