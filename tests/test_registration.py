"""transformers' auto classes know hybrids after `import hybridize`, in any order of imports, and at no cost before."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CHECK = """
from transformers import AutoConfig, AutoModelForCausalLM
from hybridize.models.configuration import HybridConfig
from hybridize.models.modeling import HybridForCausalLM
assert type(AutoConfig.for_model("hybridize")) is HybridConfig
assert AutoModelForCausalLM._model_mapping[HybridConfig] is HybridForCausalLM
"""
FIRST = {
    "ours": "import hybridize",
    "ours twice": "import hybridize\nfrom hybridize.registration import register, register_lazily\nregister_lazily()\nregister()",
    "theirs": "import transformers\nimport hybridize",
    "their auto classes": "from transformers import AutoModelForCausalLM\nimport hybridize",
    "the families": "import hybridize.models.families",
    "the configuration": "import hybridize.models.configuration",
    "the model": "from hybridize.models.modeling import HybridForCausalLM",
    "surgery": "from hybridize.models.surgery import hybridize_model",
    "the cache": "from hybridize.models.cache import HybridCache",
    "the plan": "import hybridize.plan.bytes",
    "a loader of theirs": "import hybridize\nfrom transformers import AutoTokenizer, pipeline",
}


def run(code: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("first", ["ours twice", "their auto classes", "the families"])
def test_whatever_is_imported_first(first):
    run(FIRST[first] + CHECK)


@pytest.mark.slow
@pytest.mark.parametrize("first", FIRST)
def test_every_order(first):
    run(FIRST[first] + CHECK)


def test_our_import_stays_light():
    heavy = run(
        "import sys, hybridize; print(*sorted({'torch', 'transformers', 'datasets', 'matplotlib'} & set(sys.modules)))"
    )
    assert heavy.strip() == ""
