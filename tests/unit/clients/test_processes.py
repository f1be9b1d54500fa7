"""What the processes of one run spent, in a file of each."""

from __future__ import annotations

from pathlib import Path

from quota.clients.instrument.processes import FileTally, Total, spent_in


def test_the_counts_of_all_processes_are_added(tmp_path: Path) -> None:
    for units in (1, 100):
        FileTally(str(tmp_path))("videos.list", 1, units, 0)
    # A signal handler that counts may leave the end of its longer text.
    (tmp_path / "1-a").write_text('{"a": [1, 2, 0]} 0], "b": [1, 1, 0]}')
    assert spent_in(str(tmp_path)) == {"videos.list": Total(2, 101, 0), "a": Total(1, 2, 0)}
