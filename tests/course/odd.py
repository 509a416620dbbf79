"""What honest students leave in their notebooks, cell by cell; none of it costs a point."""

CELLS = r"""
import torch
torch.set_default_dtype(torch.float64)
---
import torch, numpy as np
torch.set_grad_enabled(False)
torch.set_default_device('cpu')
np.seterr(all='raise')
---
import warnings
warnings.simplefilter('error')
---
def get_objects():
    return []
def walk_stack(stack):
    return stack
print(get_objects(), walk_stack([]))
---
class Store:
    def get_objects(self):
        return []
Store().get_objects()
---
class Thing:
    pass
random = Thing()
random.x = 1
---
import matplotlib as mpl
mpl.rcParams['figure.dpi'] = 100
mpl.rcParams.default = 1
---
import numpy as np
if not hasattr(np, 'float'):
    np.float = float
---
%reset -f
---
%debug
%pdb on
---
%timeit -n 2 -r 1 lowest([3, 1])
%time lowest([2])
---
!ls {lowest.__name__}
---
%%capture out
print(1)
---
import os
os.kill(os.getpid(), 9)
---
import doctest
doctest.testmod()
---
import unittest
class T(unittest.TestCase):
    def test(self):
        self.assertEqual(lowest([1]), 2)
unittest.main(argv=[''], exit=False)
---
import logging, traceback
logging.warning('x')
try:
    1 / 0
except ZeroDivisionError:
    logging.exception('y')
    traceback.print_exc()
    traceback.print_stack()
---
import inspect, pathlib, minillm
print(inspect.getsource(lowest), inspect.signature(lowest), inspect.getsource(minillm.LLM))
print(len((pathlib.Path(minillm.__file__).parent / 'kv_cache' / 'block_pool.py').read_text()))
---
from collections import namedtuple
from dataclasses import dataclass
from enum import Enum
P = namedtuple('P', 'a b')
class C(Enum):
    A = 1
@dataclass(order=True)
class D:
    a: int = 0
sorted([D(2), D(1)])
---
import multiprocessing
worker = multiprocessing.get_context('fork').Process(target=print)
worker.start()
worker.join()
---
import subprocess
print(subprocess.run(['true']))
---
import threading
thread = threading.Thread(target=print)
thread.start()
thread.join()
---
import asyncio
async def one():
    return 1
await one()
---
import traceback
try:
    check_lowest(lambda free: 1, 'edges')
except AssertionError as error:
    print(error)
    traceback.print_exc()
---
check_lowest?
---
import importlib
importlib.import_module('minillm.kv_cache.block_pool')
---
import cProfile
cProfile.run('lowest([1])')
---
from minillm.book.checks import last_call
last_call().again(lowest)
---
def count(n):
    yield from range(n)
import inspect
print(inspect.getgeneratorstate(count(3)))
---
import pickle, copy, gc, sys
pickle.loads(pickle.dumps([1]))
copy.deepcopy({1: [2]})
gc.collect()
sys.setrecursionlimit(5000)
---
import networkx
---
import torch, torch.fx
from torch.utils.flop_counter import FlopCounterMode
def added(x):
    return x + x
with FlopCounterMode(display=False):
    torch.fx.symbolic_trace(added)(torch.ones(2))
---
import torch
@torch.library.custom_op('student::added', mutates_args=())
def added(x: torch.Tensor) -> torch.Tensor:
    return x + x
print(added(torch.ones(2)))
---
import pydantic
class Row(pydantic.BaseModel):
    a: int = 1
print(Row(a=2), pydantic.TypeAdapter(list[int]).validate_python([1]))
---
import asyncio, threading
async def one():
    return 1
threading.Thread(target=lambda: asyncio.run(one())).start()
---
import os, tempfile, pathlib
pathlib.Path('notes').mkdir()
pathlib.Path('notes/a').write_text('x')
with tempfile.NamedTemporaryFile() as file:
    file.write(b'x')
---
%%writefile helper.py
def get_objects():
    return 1
---
import helper
print(helper.get_objects())
""".strip("\n").split("\n---\n")
