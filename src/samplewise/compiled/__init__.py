"""Compiled steps. `steps` keeps the graphs; `trace` writes one down, `sizes` makes one of several for all batch sizes, `snapshot` sees
what their code reads, `hints` and `channels_last` say to the compiler what it does not see, `replay` records what it made."""
