"""Files and folders appear whole or not at all; a full disk is one clear line and loses nothing."""

import errno
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.limits import run_limited

from hybridize.atomic import DiskFullError, atomic_folder, atomic_write, remove_stale, sha256_file


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_file_appears_at_the_end_only(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.txt"
    with atomic_write(path, "w") as file:
        file.write("first ä")
        assert not path.exists()
    assert path.read_text(encoding="utf-8") == "first ä"
    with pytest.raises(RuntimeError, match="halfway"), atomic_write(path) as file:
        file.write(b"second")
        raise RuntimeError("halfway")
    assert contents(tmp_path) == {"deep/file.txt": "first ä".encode()}
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode, "as readable as any new file"


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "model"
    with atomic_folder(path) as folder:
        (folder / "a").write_text("1")
        (folder / "sub").mkdir()
        (folder / "sub" / "b").write_text("2")
        assert not path.exists()
    with atomic_folder(path) as folder:
        (folder / "c").write_text("3")
        assert set(contents(path)) == {"a", "sub/b"}
    assert contents(tmp_path) == {"model/c": b"3"}
    with pytest.raises(RuntimeError, match="halfway"), atomic_folder(path) as folder:
        (folder / "d").write_text("4")
        raise RuntimeError("halfway")
    assert contents(tmp_path) == {"model/c": b"3"}


def test_without_an_atomic_exchange_a_folder_is_still_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridize.atomic._exchange", lambda first, second: False)
    for text in ("1", "2"):
        with atomic_folder(tmp_path / "model") as folder:
            (folder / text).write_text(text)
    assert contents(tmp_path) == {"model/2": b"2"}


WRITER = """
import os, sys
from pathlib import Path
from hybridize import atomic
atomic_folder = atomic.atomic_folder
"""


def start(code: str, *arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER + textwrap.dedent(code), *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def start_halfway(path: Path) -> subprocess.Popen[str]:
    """A process that waits in the middle of writing `path` until its input ends."""
    process = start(
        """
        with atomic_folder(sys.argv[1]) as folder:
            (folder / "half").write_text("x")
            print("halfway", flush=True)
            sys.stdin.read()
        """,
        path,
    )
    assert process.stdout is not None and process.stdout.readline() == "halfway\n"
    return process


def test_only_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    killed, living = start_halfway(tmp_path / "model"), start_halfway(tmp_path / "model")
    other = start_halfway(tmp_path / "other")
    for process in (killed, other):
        process.kill()
        process.wait()
    # a file of the user's own, and a writer on another machine
    kept = [tmp_path / ".notes.tmp", tmp_path / f".model.{killed.pid}-01234567-0@elsewhere.invalid.tmp"]
    for file in kept:
        file.write_text("x")
    with atomic_folder(tmp_path / "model") as folder:
        (folder / "a").write_text("1")
    left = {entry.name for entry in tmp_path.glob(".*")} - {file.name for file in kept}
    assert sorted(name.split("-")[0] for name in left) == [f".model.{living.pid}", f".other.{other.pid}"]

    remove_stale(tmp_path)
    assert not list(tmp_path.glob(".other.*")), "any name, where none is given"
    living.communicate()
    assert living.returncode == 0 and contents(tmp_path / "model") == {"half": b"x"}
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "model", *kept])


def test_an_earlier_process_of_our_own_number_is_gone(tmp_path: Path) -> None:
    """In a container every run may have the same process number."""
    with atomic_write(tmp_path / "file") as file:
        (ours,) = tmp_path.iterdir()
        (tmp_path / re.sub(r"-[0-9a-f]{8}-", "-01234567-", ours.name)).write_text("x")
        assert len(list(tmp_path.iterdir())) == 2
        remove_stale(tmp_path)
        assert list(tmp_path.iterdir()) == [ours]
        file.write(b"x")


@pytest.mark.parametrize("exchange", ["exchange", "no exchange"])
def test_processes_that_write_one_folder_never_mix(tmp_path: Path, exchange: str) -> None:
    code = """
    if sys.argv[3] == "no exchange":
        atomic._exchange = lambda first, second: False
    for number in range(100):
        with atomic_folder(sys.argv[1]) as fresh:
            for name in "abc":
                (fresh / name).write_text(sys.argv[2] * 1000)
    """
    writers = [start(code, tmp_path / "folder", letter, exchange) for letter in "xyz"]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    written = contents(tmp_path)
    assert written.keys() == {"folder/a", "folder/b", "folder/c"}
    assert len(set(written.values())) == 1 and len(written["folder/a"]) == 1000


def test_a_link_is_replaced_and_what_it_names_stays(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a").write_text("1")
    (tmp_path / "model").symlink_to(tmp_path / "there")
    with atomic_folder(tmp_path / "model") as folder:
        (folder / "b").write_text("2")
    assert contents(tmp_path) == {"there/a": b"1", "model/b": b"2"}
    assert not (tmp_path / "model").is_symlink() and not list(tmp_path.glob(".*"))


def test_sha256(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    assert sha256_file(tmp_path / "x") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_a_disk_known_to_be_too_small_is_refused_first(tmp_path: Path) -> None:
    refused = pytest.raises(DiskFullError, match=rf"{tmp_path}.*{10**18:,} bytes are needed")
    with refused as error, atomic_folder(tmp_path / "model", bytes_needed=10**18):
        raise AssertionError("the block must not run")
    assert "\n" not in str(error.value) and error.value.errno == errno.ENOSPC
    assert contents(tmp_path) == {}


def test_an_error_of_safetensors_is_understood(tmp_path: Path) -> None:
    out = run_limited(
        """
        import sys, torch
        from safetensors.torch import save_file
        from hybridize.atomic import DiskFullError, atomic_folder
        try:
            with atomic_folder(sys.argv[1] + "/model") as folder:
                save_file({"x": torch.zeros(100_000)}, folder / "model.safetensors")
        except DiskFullError as error:
            print(error)
        """,
        tmp_path,
        2**16,
    )
    assert out.count("\n") == 1 and str(tmp_path) in out and "bytes are needed" in out
    assert contents(tmp_path) == {}


def test_other_errors_pass_unchanged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), atomic_folder(tmp_path / "model") as folder:
        save_file({"x": torch.zeros(1)}, folder / "x.safetensors")
        (folder / "missing").read_text()
    assert contents(tmp_path) == {}
