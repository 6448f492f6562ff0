"""The training loop: it drives a stage, and knows no model.

A stage turns one micro-batch into gradients; the loop owns everything around it: accumulation, clipping, the optimizer,
schedules, validation, logs, checkpoints and resuming.
"""

import dataclasses
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridize.atomic import atomic_write
from hybridize.train import checkpoint, optim
from hybridize.train.metrics import Display, Logs, Window
from hybridize.train.process import command_line, hold_interrupt, peak_memory, seed_all
from hybridize.train.stage import (
    Batches,
    NonFiniteError,
    Progress,
    Stage,
    TrainConfig,
    TrainResult,
    batches_from,
)


def train(
    stage: Stage, batches: Batches, config: TrainConfig, folder: Path | str, *, progress: bool = True
) -> TrainResult:
    """Train a stage within its budget, or to the end of its data; call again with the same folder to continue.

    Args:
        stage: what is trained. Its frozen parts and the start of its parameters are rebuilt by the caller.
        batches: micro-batches; or better a function that gives them from an optimizer step on (step s starts at micro-batch
            `s * micro_batches`), so that resuming skips nothing. Batches may not depend on the global random state.
        config: budget, optimizer, cadence.
        folder: gets `checkpoints/`, `train.csv`, `validation.csv`, `layers.csv`, `tensorboard/`, `result.json`.
        progress: show a progress bar, or plain lines where the output is no terminal.

    Raises:
        NonFiniteError: a loss, gradient or metric is not finite; the last good checkpoint is kept.
        DiskFullError, CorruptCheckpointError: as said there.
        KeyboardInterrupt: after the current step has been finished and saved.
        ValueError: the folder belongs to another configuration, or the data are empty.
    """
    run = _Run(stage, config, Path(folder))
    iterator = batches_from(batches, run.done.step, config.micro_batches)
    total = config.steps or config.tokens or 0
    display = Display(
        stage.name, total, run.position, enabled=progress, unit="steps" if config.steps else "tokens"
    )
    with display, hold_interrupt() as interrupted:
        run.enter()
        if config.patience is not None and run.done.validated_step is None:
            run.validate(display)
        while run.position < total and run.done.stopped is None:
            micro_batches = list(itertools.islice(iterator, config.micro_batches))
            if not micro_batches:
                break
            run.step(micro_batches)
            run.after_step(display)
            if interrupted():
                run.save()
                display.say(f"Interrupted; step {run.done.step} is saved. Continue with: {command_line()}")
                raise KeyboardInterrupt
        return run.finish(display)


class _Run:
    def __init__(self, stage: Stage, config: TrainConfig, folder: Path):
        self.stage, self.config, self.folder = stage, config, folder
        self.parameters = stage.parameters()
        self.optimizer = optim.adamw(self.parameters, betas=config.betas, weight_decay=config.weight_decay)
        self.schedule = optim.schedule(config.lr)
        self.device = next(iter(self.parameters.values())).device
        self.window, self.done, self.saved = Window(), Progress(), False
        self.pending: list[tuple[int, list[str], Tensor, Tensor]] = []
        self.checkpoints = folder / "checkpoints"
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self.found = checkpoint.load_latest(self.checkpoints)
        if self.found is not None:
            self._restore(self.found)
        self.logs = Logs(folder, self.done.step, config.tensorboard)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def position(self) -> int:
        return self.done.step if self.config.steps is not None else self.done.tokens

    @property
    def epoch(self) -> int:
        if self.config.epoch_steps is not None:
            return self.done.step // self.config.epoch_steps
        return self.done.tokens // self.config.epoch_tokens if self.config.epoch_tokens is not None else 0

    def enter(self) -> None:
        """Begin or continue. The random state comes last: making iterators and stages may have drawn from it."""
        if self.found is None:
            seed_all(self.config.seed)
        self._begin_epoch()
        if self.found is not None:
            checkpoint.set_rng_state(_under(self.found.tensors, "rng/"), self.found.state["rng"])
        self.found = None
        self.tick = self.saved_at = time.monotonic()

    def _begin_epoch(self) -> None:
        """Announce the epoch. What a stage draws then depends on the seed and the epoch alone, so that it can be told again."""
        self.current_epoch = self.epoch
        tensors, values = checkpoint.rng_state()
        seed_all(self.config.seed + 1 + self.current_epoch)
        self.stage.on_boundary(self.current_epoch)
        checkpoint.set_rng_state(tensors, values)

    def step(self, micro_batches: list[Any]) -> None:
        """One optimizer step. The loss is a mean over the counted tokens of all its micro-batches."""
        if self.epoch != self.current_epoch:
            self._begin_epoch()
        counts = [self.stage.count(batch) for batch in micro_batches]
        total = sum(counts)
        if total > 0:  # a step in which nothing counts changes nothing
            self._update(micro_batches, counts, total)
        self.done.step += 1
        self.done.tokens += total
        self.saved = False
        self._clock(busy=True)

    def _update(self, micro_batches: list[Any], counts: list[int], total: int) -> None:
        number = self.done.step + 1
        losses: list[Tensor] = []
        for batch, count in zip(micro_batches, counts, strict=True):
            if count == 0:
                continue
            result = self.stage.step(batch, 1 / total)
            if result.tokens != count:
                raise ValueError(
                    f"stage {self.stage.name} counted {result.tokens} tokens in step() and {count} in count()"
                )
            losses.append(torch.as_tensor(result.loss).detach().to(self.device, torch.float32))
            self.window.add("loss", result.loss, count)
            for name, value in result.metrics.items():
                self.window.add(name, torch.as_tensor(value).detach() * count, count)
        names, norms = optim.gradient_norms(self.parameters)
        norm = optim.clip(self.parameters, norms, self.config.clip)
        self.window.add("grad_norm", norm * total, total)
        self.pending.append((number, names, torch.stack(losses).sum(), norms))
        if self.device.type == "cpu":
            self.check_finite()  # costs nothing here, and leaves the weights as they were
        rate = self.schedule.lr(self._progress())
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _progress(self) -> float:
        """The share of the budget at the end of the step under way, as far as it is known."""
        if self.config.steps is not None:
            return (self.done.step + 1) / self.config.steps
        return self.done.tokens / (self.config.tokens or 1)

    def check_finite(self) -> None:
        """One synchronisation for all steps since the last check."""
        if not self.pending:
            return
        # squares may overflow where the norms are finite: what clips is the total norm
        sums = [loss + torch.linalg.vector_norm(norms) for _, _, loss, norms in self.pending]
        pending, self.pending = self.pending, []
        good = torch.stack(sums).isfinite().tolist()
        if all(good):
            return
        number, names, loss, norms = pending[good.index(False)]
        bad = [name for name, value in zip(names, norms.tolist(), strict=True) if not math.isfinite(value)]
        parts = [f"loss {loss.item():.4g}"]
        if not (norm := torch.linalg.vector_norm(norms)).isfinite():
            parts.append(f"gradient norm {norm.item():.4g}")
        if bad:
            parts.append(f"first non-finite gradient in {bad[0]} ({len(bad)} of {len(names)} parameters)")
        for name, value in self.window.read().items():
            values = value if isinstance(value, list) else []
            layers = [layer for layer, x in enumerate(values) if not math.isfinite(x)]
            if layers:
                parts.append(f"{name} is not finite from layer {layers[0]} on")
        self._not_finite(number, "; ".join(parts), bad)

    def _not_finite(self, step: int, what: str, parameters: list[str]) -> None:
        check = getattr(self.stage, "check", None)
        if check is not None and (said := check()):
            what = f"{what}; {said}"
        kept = checkpoint.steps(self.checkpoints)
        where = f"the last good checkpoint is {kept[-1]}" if kept else "there is no checkpoint yet"
        raise NonFiniteError(
            f"{self.stage.name}, step {step}: not finite: {what}; {where}: lower the learning rate or look at the data",
            step,
            parameters,
        )

    def after_step(self, display: Display) -> None:
        config, step = self.config, self.done.step
        display.advance(self.position)
        if step % config.log_every == 0:
            self.log(display)
        if config.eval_every is not None and step % config.eval_every == 0:
            self.validate(display)
        due = config.save_every is not None and step % config.save_every == 0
        late = config.save_every_s is not None and time.monotonic() - self.saved_at >= config.save_every_s
        if due or late:
            self.save()

    def log(self, display: Display) -> None:
        self.check_finite()
        self._clock(busy=True)
        values = self.window.read()
        if not values:
            return
        speed = (self.done.tokens - self.done.logged_tokens) / max(
            self.done.busy - self.done.logged_busy, 1e-9
        )
        self.done.logged_tokens, self.done.logged_busy = self.done.tokens, self.done.busy
        rate = self.optimizer.param_groups[0]["lr"]
        fixed = {
            "tokens": self.done.tokens,
            "loss": values.pop("loss"),
            "lr": rate,
            "grad_norm": values.pop("grad_norm"),
        }
        values = {
            **fixed,
            "tokens_per_second": round(speed, 1),
            "seconds": round(self.done.elapsed, 3),
            **values,
        }
        self.logs.step(self.done.step, values)
        self.saved = False
        display.show(values)

    def validate(self, display: Display) -> None:
        config = self.config
        self.check_finite()
        self._clock(busy=True)
        tensors, values = checkpoint.rng_state()
        metrics = self.stage.validate()
        checkpoint.set_rng_state(tensors, values)  # how often one looks does not change what is trained
        if config.monitor not in metrics:
            raise ValueError(f"monitor is {config.monitor!r}: validation gives {', '.join(sorted(metrics))}")
        metric = float(metrics[config.monitor])
        if not math.isfinite(metric):
            self._not_finite(self.done.step, f"validation {config.monitor} is {metric}", [])
        self.done.validated_step, self.done.final_metric = self.done.step, metric
        self.logs.validated(self.done.step, {"tokens": self.done.tokens, **metrics})
        self.schedule.observe(metric)
        self.saved = False
        guarded = self._guarded(metrics)
        better = guarded and (self.done.best_metric is None or metric < self.done.best_metric)
        self.done.not_good = 0 if better else self.done.not_good + 1
        if better:
            self.done.best_step, self.done.best_metric = self.done.step, metric
            if config.keep_best:
                path = checkpoint.best_path(self.checkpoints, self.done.step)
                checkpoint.save(path, self.parameters, {"step": self.done.step, "metric": metric})
        display.say(
            f"{self.stage.name} step {self.done.step}: validation {config.monitor} {metric:.5g}"
            + (f", {config.guard} {metrics[config.guard]:.4g}" if config.guard else "")
            + " (best)" * better
        )
        if config.patience is not None and self.done.not_good >= config.patience:
            self.done.stopped = self._why_stopped(metrics, guarded)
            display.say(f"{self.stage.name} stops at step {self.done.step}: {self.done.stopped}")
        self._clock(busy=False)

    def _guarded(self, metrics: dict[str, float]) -> bool:
        """Whether the guard keeps its share of the highest value seen; a guard that was never positive has nothing to keep."""
        guard, share = self.config.guard, self.config.guard_share
        if guard is None or share is None:
            return True
        if guard not in metrics:
            raise ValueError(f"guard is {guard!r}: validation gives {', '.join(sorted(metrics))}")
        value = float(metrics[guard])
        self.done.best_guard = value if self.done.best_guard is None else max(self.done.best_guard, value)
        return self.done.best_guard <= 0 or value >= share * self.done.best_guard

    def _why_stopped(self, metrics: dict[str, float], guarded: bool) -> str:
        guard = self.config.guard
        if guard is not None and not guarded:
            return f"{guard} is {metrics[guard]:.4g}, under {self.config.guard_share:.0%} of the highest seen, {self.done.best_guard:.4g}"
        return f"{self.config.monitor} did not improve in {self.done.not_good} validations"

    def save(self) -> None:
        self.check_finite()
        self._clock(busy=True)
        sums, weights = self.window.state()
        rng, rng_values = checkpoint.rng_state()
        tensors: dict[str, Tensor] = {f"parameters/{name}": value for name, value in self.parameters.items()}
        slots = optim.optimizer_tensors(self.optimizer, self.parameters)
        tensors |= {f"optimizer/{name}": value for name, value in slots.items()}
        tensors |= {f"window/{name}": value for name, value in sums.items()}
        tensors |= {f"rng/{name}": value for name, value in rng.items()}
        state = {
            **dataclasses.asdict(self.done),
            "schedule": self.schedule.state_dict(),
            "rng": rng_values,
            "window": weights,
            "config": self.config.fingerprint(),
        }
        checkpoint.save(checkpoint.step_path(self.checkpoints, self.done.step), tensors, state)
        checkpoint.prune(self.checkpoints)
        self.saved, self.saved_at = True, time.monotonic()
        self._clock(busy=False)

    def _restore(self, found: checkpoint.Checkpoint) -> None:
        ours, theirs = self.config.fingerprint(), found.state["config"]
        for name in ours:
            if ours[name] != theirs.get(name):
                raise ValueError(
                    f"{name} is {ours[name]}, but {self.folder} was trained with {theirs.get(name)}:"
                    " restore the former value or choose another folder"
                )
        self._set_parameters(_under(found.tensors, "parameters/"), found.path)
        optim.load_optimizer_tensors(self.optimizer, self.parameters, _under(found.tensors, "optimizer/"))
        self.window.load(_under(found.tensors, "window/"), found.state["window"], self.device)
        self.schedule.load_state_dict(found.state["schedule"])
        self.done = Progress(
            **{
                counter.name: found.state[counter.name]
                for counter in dataclasses.fields(Progress)
                if counter.name in found.state
            }
        )
        self.saved = True

    @torch.no_grad()
    def _set_parameters(self, tensors: dict[str, Tensor], path: Path) -> None:
        if differ := set(tensors) ^ set(self.parameters):
            raise ValueError(
                f"parameter {min(differ)} is not in both the stage and {path}: the model or recipe has changed"
            )
        for name, parameter in self.parameters.items():
            if parameter.shape != tensors[name].shape:
                raise ValueError(
                    f"parameter {name} has shape {tuple(parameter.shape)} and in {path} {tuple(tensors[name].shape)}:"
                    " the model or recipe has changed"
                )
            parameter.copy_(tensors[name])

    def finish(self, display: Display) -> TrainResult:
        if self.done.step == 0 and self.done.stopped is None:
            raise ValueError("batches is empty: the data gave no batch to train on")
        self.log(display)
        if self.config.eval_every is not None and self.done.validated_step != self.done.step:
            self.validate(display)
        if not self.saved:
            self.save()
        restored = "final"
        if self.config.keep_best and self.done.best_step not in (None, self.done.step):
            best = self._load_best()
            self._set_parameters(best.tensors, best.path)
            restored = "best"
        self.logs.close()
        done = self.done
        result = TrainResult(
            steps=done.step,
            tokens=done.tokens,
            seconds=done.elapsed,
            tokens_per_second=done.tokens / max(done.busy, 1e-9),
            peak_memory_bytes=peak_memory(self.device),
            best_step=done.best_step,
            best_metric=done.best_metric,
            final_metric=done.final_metric,
            restored=restored,
            history=str(self.logs.train.path),
            stopped=done.stopped,
        )
        with atomic_write(self.folder / "result.json", "w") as file:
            json.dump(dataclasses.asdict(result), file, indent=1)
        return result

    def _load_best(self) -> checkpoint.Checkpoint:
        try:
            return checkpoint.load(checkpoint.best_path(self.checkpoints, self.done.best_step or 0))
        except checkpoint.CorruptCheckpointError as error:
            raise checkpoint.CorruptCheckpointError(
                f"{error}, and it holds the best parameters: remove {self.checkpoints} to train the stage again, or "
                "switch keep_best off to end with the last ones"
            ) from error

    def _clock(self, *, busy: bool) -> None:
        now = time.monotonic()
        self.done.elapsed += now - self.tick
        self.done.busy += (now - self.tick) * busy
        self.tick = now


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
