"""A campaign against the compiler: random models, each compared with the plain model under many plans and batches.

    python -m tests.campaign --hours 1 --seed 7 --jobs 2 --out campaign-7

Each model is source text, put together from pieces (`pieces*.py`) by `recipe.py`, and is told what to do by a list of
runs (`setting.py`): calls, steps, evaluation, faults, over many devices, schedules and batch sizes. `trial.py` does
that and compares, `shrink.py` makes what fails smaller and writes a script, `workers.py` replaces what hangs.
"""
