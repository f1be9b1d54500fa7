"""One house for all tests of the page, and the page over it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quota.jobs.emulator import Emulator
from support.commands import Quota
from support.page import furnish, serve
from support.web import Served


@pytest.fixture(scope="package")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Quota]:
    folder = tmp_path_factory.mktemp("house")
    with pytest.MonkeyPatch.context() as patch, Emulator() as upstream:
        patch.setenv("QUOTA_STATE_DIR", str(folder / "state"))
        patch.setenv("KEY", "a-key-for-tests")
        yield furnish(folder, upstream)


@pytest.fixture(scope="package")
def page(house: Quota) -> Iterator[Served]:
    with serve(house) as served:
        yield served
