"""Hybrid models of every supported family.

transformers' auto classes load first: `hybridize.registration` imports the modules of this package as soon as they are
there, and must not find one of them half imported.
"""

import transformers.models.auto.modeling_auto  # noqa: F401
