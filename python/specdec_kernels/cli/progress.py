"""A progress bar on stderr for measurements."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE_SECONDS = 2.0  # a run that is shorter shows no bar


@contextmanager
def progress(total: int, first: str = "measuring the device") -> Iterator[Callable[[str], None]]:
    """Show a bar with the time left, on a terminal, if rich is installed and the run is longer than PATIENCE_SECONDS.

    Yields a function that takes what is measured next and advances the bar by one of `total`.
    """
    if importlib.util.find_spec("rich") is None:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task(first, total=total)
    start = threading.Timer(PATIENCE_SECONDS, bar.start)
    start.daemon = True
    start.start()
    try:
        yield lambda what: bar.update(task, description=what, advance=1)
    finally:
        start.cancel()
        start.join()
        bar.stop()
