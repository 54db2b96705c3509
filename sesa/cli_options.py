"""Options that several commands share, and opening the store that they name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from sesa.store import Store

Root = Annotated[str, typer.Option("--root", help="Folder that holds the runs and their store.", show_default=True)]
StoreUrl = Annotated[str, typer.Option("--store", help="URL or file of the store; default: a file in --root.")]
Run = Annotated[str, typer.Option("--run", help='Run id, or "latest".', show_default=True)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON with stable keys.")]
Limit = Annotated[int, typer.Option("--limit", min=1, help="Most rows to print.")]
Offset = Annotated[int, typer.Option("--offset", min=0, help="Rows to leave out at the start.")]
ConfigFile = Annotated[str, typer.Option("--config", help="TOML file of the configuration, e.g. configs/cpu.toml.")]


def open_store(root: str, store: str) -> Store:
    """The store that --root and --store name; a reading command never makes one. Raises as ``Store.open``."""
    from sesa.store import Store, store_location

    return Store.open(store_location(root, store), create=False)
