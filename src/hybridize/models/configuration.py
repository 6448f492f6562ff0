"""`HybridConfig`: the base model's own fields at top level, plus which base it is and the resolved spec."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from hybridize.spec import SPEC_VERSION, ResolvedSpec

STUB = "hybridize_stub"
OURS = ("base_model_type", "hybrid_spec", "spec_version")
NOT_FIELDS = ("model_type", "transformers_version", "architectures", "auto_map", "_name_or_path")


class HybridConfig(PreTrainedConfig):
    """Config of a hybrid made from `base_model_type`. `hybrid_spec` is the resolved spec, one entry a layer."""

    model_type = "hybridize"

    def __init__(
        self,
        base_model_type: str | None = None,
        hybrid_spec: dict[str, Any] | None = None,
        spec_version: int = SPEC_VERSION,
        use_cache: bool = True,
        **base_fields: Any,
    ) -> None:
        if spec_version != SPEC_VERSION:
            raise ValueError(
                f"spec_version is {spec_version}; this hybridize reads version {SPEC_VERSION}. Install the version that wrote it"
            )
        self.base_model_type = base_model_type
        self.hybrid_spec = hybrid_spec
        self.spec_version = spec_version
        base_fields.setdefault(
            "auto_map",
            {"AutoConfig": f"{STUB}.HybridConfig", "AutoModelForCausalLM": f"{STUB}.HybridForCausalLM"},
        )
        super().__init__(**base_fields)
        self.use_cache = use_cache

    @classmethod
    def from_base(cls, base: PreTrainedConfig, spec: ResolvedSpec) -> HybridConfig:
        """The hybrid config of a base config object and a resolved spec."""
        fields = {key: value for key, value in base.to_dict().items() if key not in NOT_FIELDS}
        return cls(base_model_type=base.model_type, hybrid_spec=spec.model_dump(mode="json"), **fields)

    def base_config(self) -> PreTrainedConfig:
        """The base model's config, every field as it was."""
        fields = {key: value for key, value in self.to_dict().items() if key not in (*OURS, *NOT_FIELDS)}
        if self.base_model_type is None:
            raise ValueError(
                "base_model_type is missing from config.json; the folder is not a hybridize checkpoint"
            )
        if self.base_model_type not in CONFIG_MAPPING:
            raise ValueError(
                f"base_model_type is {self.base_model_type!r}; it must be a model type of the installed transformers"
            )
        return CONFIG_MAPPING[self.base_model_type].from_dict(fields)

    @property
    def spec(self) -> ResolvedSpec:
        if self.hybrid_spec is None:
            raise ValueError(
                "hybrid_spec is missing from config.json; the folder is not a hybridize checkpoint"
            )
        return ResolvedSpec.model_validate(self.hybrid_spec)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Kept from copying source files into checkpoints: the stub imports the installed package."""
