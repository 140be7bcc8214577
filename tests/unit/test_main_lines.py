"""What a main script does to modules and libraries is found in its source."""

from __future__ import annotations

from pathlib import Path

from multienv._engine.building.main_lines import found_in


def test_what_a_script_does_to_modules_and_libraries_is_found(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        """import ctypes, os, os.path as path
import numpy as np
import torch
from somewhere import mymod
LIB = ctypes.CDLL("sim.so")
LIB.step.restype = ctypes.c_double
mymod.G = 9.81                 # 7
np.seterr(all="raise")         # 8
LIB.init(9.81)                 # 9
if path.exists("fast"):
    mymod.N += 1               # 11
else:
    try:
        mymod.part.M: int = 3  # 14
    except ValueError:
        mymod.part.M = 4       # 16
x = np.zeros(3)
x[0] = LIB.step
x.flags.writeable = False
mymod.table["x"] = 1           # 20
os.environ["X"] = os.linesep = "y"
torch.backends.cudnn.deterministic = True
print(x)
class Env:
    mymod.H = 1
def make():
    mymod.G = 1
if __name__ == "__main__":
    mymod.G = 2
"""
    )
    assert found_in(str(script)) == (7, 8, 9, 11, 14, 16, 20)
    assert found_in(str(tmp_path / "absent.py")) == ()
