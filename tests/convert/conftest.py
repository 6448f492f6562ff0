"""A teacher and texts in files, a cache of these tests' own, and the same import path in processes they start."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.convert import bench


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYBRIDIZE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        yield


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As the processes that these tests start: the same bits need the same order of sums. Also faster on tiny models."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bench.write_teacher(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bench.write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bench.write_questions(tmp_path_factory.mktemp("questions"))
