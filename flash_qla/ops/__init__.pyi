# What type checkers see of ops.py, which at run time has this submodule: see __init__.py of the package.
from flash_qla.ops import gated_delta_rule as gated_delta_rule
