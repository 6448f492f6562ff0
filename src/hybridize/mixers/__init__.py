"""Parameters around an operation. `registry.build_mixer` makes the mixer of a head group."""
