"""A disk that fills while training saves costs nothing but the checkpoint that did not fit."""

from pathlib import Path

from tests.limits import run_limited

from hybridize.train import checkpoint


def test_a_disk_that_fills_while_training_saves(tmp_path: Path) -> None:
    """The former checkpoint stays, the error names the folder and the bytes, and the run goes on once there is room."""
    out = run_limited(
        """
        import sys, torch
        from pathlib import Path
        from toy import Toy, batches, config
        from hybridize.train import checkpoint, train
        from hybridize.atomic import DiskFullError
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
