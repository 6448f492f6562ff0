"""Files and folders appear whole or not at all; a full disk is one clear line and loses nothing."""

import errno
import os
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hybridize.train import checkpoint
from hybridize.train.atomic import DiskFullError, atomic_folder, atomic_write, remove_stale, sha256_file


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
    monkeypatch.setattr("hybridize.train.atomic._exchange", lambda first, second: False)
    for text in ("1", "2"):
        with atomic_folder(tmp_path / "model") as folder:
            (folder / text).write_text(text)
    assert contents(tmp_path) == {"model/2": b"2"}


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".model.tmp").mkdir()
    (tmp_path / ".model.tmp" / "half").write_text("x")
    (tmp_path / ".file.tmp").write_text("x")
    with atomic_folder(tmp_path / "model") as folder:
        (folder / "a").write_text("1")
    remove_stale(tmp_path)
    assert contents(tmp_path) == {"model/a": b"1"}


def test_sha256(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    assert sha256_file(tmp_path / "x") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_a_disk_known_to_be_too_small_is_refused_first(tmp_path: Path) -> None:
    refused = pytest.raises(DiskFullError, match=rf"{tmp_path}.*{10**18:,} bytes are needed")
    with refused as error, atomic_folder(tmp_path / "model", bytes_needed=10**18):
        raise AssertionError("the block must not run")
    assert "\n" not in str(error.value) and error.value.errno == errno.ENOSPC
    assert contents(tmp_path) == {}


def limited(code: str, folder: Path, limit: int) -> str:
    """Run code in a process whose files cannot grow past `limit` bytes, as on a full disk."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(folder)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_disk_that_fills_while_training_saves(tmp_path: Path) -> None:
    """The former checkpoint stays, the error names the folder and the bytes, and the run goes on once there is room."""
    out = limited(
        """
        import sys, torch
        from pathlib import Path
        from toy import Toy, batches, config
        from hybridize.train import checkpoint, train
        from hybridize.train.atomic import DiskFullError
        folder, stage = Path(sys.argv[1]), Toy()
        class Growing(Toy):
            grown = False
            def step(self, batch, scale):
                if not self.grown and checkpoint.step_path(folder / "checkpoints", 2).exists():
                    import resource
                    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
                return super().step(batch, scale)
        try:
            train(Growing(), batches, config("constant", steps=6, eval_every=None, log_every=100), folder, progress=False)
        except DiskFullError as error:
            print(error)
        """,
        tmp_path,
        2**24,
    )
    assert out.count("\n") == 1 and str(tmp_path / "checkpoints") in out and "bytes are needed" in out
    assert [path.name for path in checkpoint.steps(tmp_path / "checkpoints")] == ["step-00000002"]
    assert checkpoint.load(checkpoint.step_path(tmp_path / "checkpoints", 2)).state["step"] == 2
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_an_error_of_safetensors_is_understood(tmp_path: Path) -> None:
    out = limited(
        """
        import sys, torch
        from safetensors.torch import save_file
        from hybridize.train.atomic import DiskFullError, atomic_folder
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


@pytest.mark.skipif(
    not os.path.ismount("/dev/full") and not os.path.exists("/dev/full"), reason="no /dev/full"
)
def test_other_errors_pass_unchanged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), atomic_folder(tmp_path / "model") as folder:
        save_file({"x": torch.zeros(1)}, folder / "x.safetensors")
        (folder / "missing").read_text()
    assert contents(tmp_path) == {}
