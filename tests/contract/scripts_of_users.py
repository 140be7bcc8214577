"""Scripts as users write them: each has something at its top that an env of the script uses.

``BY_VALUE``: all of it travels to a worker, from anywhere: a file without a main guard, standard input, a notebook.
``BY_NAME``: some of it cannot, or it tells a library something; the worker imports the script, which is a file with a
main guard.

A script defines ``Env``, or ``make``, which builds one; ``value(action)`` is what it observes, ``info()`` its info. The
names that they use are imported by ``HEAD``.
"""

from __future__ import annotations

SIMULATOR = """
#include <stdlib.h>
typedef struct { double x, v; int n; } State;
double sim_next(double x, double a) { return 0.5 * x + a; }
void sim_step(double *x, int n, double a) { for (int i = 0; i < n; i++) x[i] += a * (i + 1); }
int sim_move(State *s, double a) { s->v += a; s->x += s->v; s->n++; return s->n; }
double sim_call(double (*f)(double), double x) { return f(x); }
static double gravity = 1;
void sim_init(double g) { gravity = g; }
double sim_gravity(void) { return gravity; }
State *sim_new(void) { return calloc(1, sizeof(State)); }
"""
HEAD = """
import os, sys
import gymnasium, numpy as np
from small_env import SmallEnv, fingerprint
"""
DECLARED = """
import ctypes
from ctypes import POINTER, c_double, c_int
LIB = ctypes.CDLL({path})
LIB.sim_next.restype = c_double
LIB.sim_next.argtypes = [c_double, c_double]
LIB.sim_step.restype = None
LIB.sim_step.argtypes = [POINTER(c_double), c_int, c_double]
Row = c_double * 4
class Env(SmallEnv):
    def value(self, a):
        x = Row()
        LIB.sim_step(x, 4, a)
        return LIB.sim_next(self.x, a) + x[3]
"""

BY_VALUE = {
    "settings of modules": """
import small_env, small_settings
from small_settings import TABLE
small_env.gravity = 9.81
with open(os.devnull) as file:
    small_env.SmallEnv.mass = 3
np.seterr(all="raise")
setattr(small_settings, "A", 2.5)
small_settings.configure(7)
TABLE.update(k=5)
vars(small_settings)["E"] = [1, 2]
def main():
    import small_settings as settings
    settings.Options.speed = 11
main()
class Env(SmallEnv):
    def value(self, a):
        import small_settings as there
        parts = [there.A, there.B, there.TABLE["k"], there.seen()["k"], len(there.E), there.Options.speed]
        try:
            return small_env.gravity * self.mass / (np.float64(a) - 1)
        except FloatingPointError:
            assert there.OWN_PROCESS == os.getpid()
            return small_env.gravity + sum(2**i * part for i, part in enumerate(parts))
""",
    "library by its path": DECLARED.format(path='os.path.abspath("sim.so")'),
    "library by a relative path": DECLARED.format(path='"./sim.so"'),
    "library that the loader finds": """
import ctypes
M = ctypes.CDLL("libm.so.6")
M.cos.restype = ctypes.c_double
M.cos.argtypes = [ctypes.c_double]
HERE = ctypes.CDLL(None, use_errno=True)
class Env(SmallEnv):
    def value(self, a):
        ctypes.set_errno(0)
        HERE.close(-1)
        return M.cos(a) + HERE.abs(-3) + ctypes.get_errno()
""",
    "library and arrays of numpy": """
import ctypes, numpy.ctypeslib
LIB = numpy.ctypeslib.load_library("sim", ".")
LIB.sim_step.argtypes = [numpy.ctypeslib.ndpointer(np.float64, 1, flags="C_CONTIGUOUS"), ctypes.c_int, ctypes.c_double]
LIB.sim_step.restype = None
class Env(SmallEnv):
    def value(self, a):
        x = np.zeros(3)
        LIB.sim_step(x, 3, a)
        return x.sum()
""",
    "function of a library": """
import ctypes
LIB = ctypes.CDLL("./sim.so")
NEXT = LIB["sim_next"]
NEXT.restype = ctypes.c_double
NEXT.argtypes = (ctypes.c_double, ctypes.c_double)
def doubled(result, function, arguments): return 2 * result
NEXT.errcheck = doubled
class Env(SmallEnv):
    def value(self, a): return NEXT(self.x, a)
""",
    "structures of a library": """
from ctypes import *
class State(Structure):
    _fields_ = [("x", c_double), ("v", c_double), ("n", c_int)]
    def moved(self, a): LIB.sim_move(byref(self), a); return self.x + len(States())
States = State * 3
LIB = CDLL("./sim.so")
LIB.sim_move.argtypes = [POINTER(State), c_double]
LIB.sim_new.restype = POINTER(State)
class Env(SmallEnv):
    def reset(self, **kw):
        self.s = State(); self.p = LIB.sim_new(); self.many = States()
        return super().reset(**kw)
    def value(self, a):
        LIB.sim_move(self.p, a); LIB.sim_move(self.many[1], a)
        return self.s.moved(a) + self.p.contents.x + self.many[1].n
""",
    "structures of many kinds": """
from ctypes import *
class Point(Structure):
    _pack_ = 1
    _fields_ = [("kind", c_uint8, 4), ("flag", c_uint8, 4), ("y", c_double)]
    def twice(self): return 2 * self.y
class Value(Union):
    _fields_ = [("i", c_int64), ("d", c_double)]
class Node(Structure): pass
Node._fields_ = [("next", POINTER(Node)), ("at", Point), ("value", Value)]
class Big(BigEndianStructure):
    _fields_ = [("n", c_uint16)]
class Derived(Point):
    _anonymous_ = ["value"]
    _fields_ = [("z", c_double), ("value", Value)]
CALL = CFUNCTYPE(c_double, c_double)
DEFAULT = Point(1, 2, 3.0)
class Env(SmallEnv):
    def value(self, a):
        last = Node(None, Point(1, 2, a), Value(d=1.5)); node = Node(pointer(last))
        derived = Derived(1, 2, 3., a); derived.d = 2.5
        called = CALL(lambda x: x + 1)(a)
        return node.next.contents.at.twice() + sizeof(Point) + bytes(Big(1))[1] + derived.z + derived.value.d + DEFAULT.y + called
""",
    "cached property": """
from functools import cached_property
class Env(SmallEnv):
    @cached_property
    def table(self): return [1, 2, 3]
    def value(self, a): return self.table[a]
""",
    "caches": """
from functools import lru_cache, cache
@lru_cache(maxsize=7, typed=True)
def f(n): return n if n < 2 else f(n - 1) + f(n - 2)
@cache
def g(n): "Doc."; return 2 * n
class Env(SmallEnv):
    @lru_cache
    def h(self, n): return n
    @staticmethod
    @cache
    def i(n): return n
    def value(self, a):
        known = f.cache_info().currsize
        f(3)
        assert f.cache_info().currsize == 4 and g.__doc__ == "Doc."
        return f(a) + g(a) + f.cache_parameters()["maxsize"] + self.h(a) + self.i(a)
""",
    "dispatch by type": """
from functools import singledispatch, singledispatchmethod, partialmethod
@singledispatch
def f(x): return 0
@f.register
def _(x: int): return x
class Env(SmallEnv):
    @singledispatchmethod
    def h(self, x): return 0
    @h.register
    def _(self, x: int): return x
    def k(self, x, y): return x + y
    three = partialmethod(k, 3)
    def value(self, a): return f(a) + self.h(a) + self.three(a)
""",
    "typed dicts and tuples": """
from typing import TypedDict, NamedTuple
class A(TypedDict):
    x: float
class B(A, total=False):
    y: float
C = TypedDict("C", {"z": float})
class P(NamedTuple):
    x: float
    y: float = 2.0
class Env(SmallEnv):
    def value(self, a):
        b: B = B(x=a, y=1); c: C = C(z=a)
        return b["x"] + c["z"] + P(a).y + len(B.__required_keys__)
    def info(self): return {"p": P(self.x), "b": B(x=1)}
""",
    "enums": """
import enum
class Mode(enum.Enum):
    SLOW = 1
    FAST = enum.auto()
    @property
    def twice(self): return 2 * self.value
class Bits(enum.IntFlag):
    A = 1
    B = 2
class Env(SmallEnv):
    mode = Mode.FAST
    def value(self, a): return (self.mode is Mode.FAST) + (Bits.A | Bits.B) + Mode.SLOW.twice
    def info(self): return {"mode": self.mode, "same": self.mode is Mode.FAST, "bits": Bits.A}
""",
    "slots": """
from dataclasses import dataclass
class Pose:
    __slots__ = ("x", "y")
    def __init__(self, x, y): self.x = x; self.y = y
    def __repr__(self): return f"Pose({self.x}, {self.y})"
class Pose3(Pose):
    __slots__ = "z", "__secret"
    def __init__(self): super().__init__(1, 2); self.z = 3; self.__secret = 4
    def __repr__(self): return f"Pose3({self.x}, {self.y}, {self.z}, {self.__secret})"
@dataclass(slots=True)
class D:
    x: float
    y: float = 0.0
@dataclass(frozen=True, slots=True)
class F:
    x: float
class Env(SmallEnv):
    def value(self, a): return not hasattr(Pose(1, 2), "__dict__")
    def info(self): return {"pose": Pose(self.x, 1), "three": Pose3(), "d": D(self.x), "f": F(self.x)}
""",
    "dataclasses": """
from dataclasses import dataclass, field, fields, KW_ONLY, replace
@dataclass
class Config:
    x: float = 1.0
    _: KW_ONLY
    names: list[str] = field(default_factory=list)
CONFIG = Config(2.0, names=["a"])
class Env(SmallEnv):
    def __init__(self, config=CONFIG): self.config = replace(config, x=3.0)
    def value(self, a): return self.config.x + len(fields(self.config))
    def info(self): return {"config": self.config}
""",
    "small things of the standard library": """
import logging, re, struct, random, types, itertools, operator, collections, decimal
LOG = logging.getLogger("sim")
LOG.addHandler(logging.NullHandler())
WORD = re.compile("[a-z]+")
HEAD = struct.Struct("<id")
RNG = random.Random(3)
TABLE = types.MappingProxyType({"a": 1})
COUNT = itertools.count(5)
GET = operator.itemgetter(0)
CHAIN = collections.ChainMap({"a": 1})
class Env(SmallEnv):
    def value(self, a):
        LOG.info("hello")
        return len(WORD.findall("a b")) + HEAD.unpack(HEAD.pack(1, 2.0))[1] + TABLE["a"] + GET([1]) + CHAIN["a"] + 0 * RNG.random()
""",
    "type hints": """
import typing
class Config:
    side: "Side"
class Side:
    x = 3
class Env(SmallEnv):
    def value(self, a): return (typing.get_type_hints(Config)["side"] is Side) + Side.x
""",
    "weak references": """
import weakref
class Thing: pass
KEEP = Thing()
REF = weakref.ref(KEEP)
GONE = weakref.ref(Thing())
CACHE = weakref.WeakValueDictionary(k=KEEP)
KEYS = weakref.WeakKeyDictionary({KEEP: 3})
SET = weakref.WeakSet([KEEP])
class Env(SmallEnv):
    def value(self, a): return (REF() is KEEP) + (CACHE["k"] is KEEP) + KEYS[KEEP] + (KEEP in SET) + (GONE() is None)
""",
    "abstract and generic classes": """
import abc
from typing import Generic, TypeVar, Protocol, NewType, Literal, Annotated, Optional, runtime_checkable
T = TypeVar("T")
Meters = NewType("Meters", float)
Side = Literal["l", "r"]
class Shape(abc.ABC):
    @property
    @abc.abstractmethod
    def area(self): ...
@Shape.register
class Virtual: pass
class Square(Shape):
    @property
    def area(self): return 4
class Box(Generic[T]):
    def __init__(self, x: T): self.x = x
class IntBox(Box[int]): pass
@runtime_checkable
class HasArea(Protocol):
    def twice(self) -> float: ...
class Env(SmallEnv):
    def value(self, a: Annotated[int, 3], side: Side = "l", m: Optional[int] = None):
        return Square().area + isinstance(Virtual(), Shape) + Box[int](3).x + IntBox(2).x + isinstance(Square(), HasArea) + Meters(a)
""",
    "metaclass and descriptors": """
class Meta(type):
    def __new__(mcs, name, bases, ns, **kw): return super().__new__(mcs, name, bases, {**ns, "made": 5})
    def __init__(cls, name, bases, ns, **kw): super().__init__(name, bases, ns)
class Mine(metaclass=Meta, flavour="x"): pass
class Field:
    def __set_name__(self, owner, name): self.name = "_" + name
    def __get__(self, obj, owner=None): return getattr(obj, self.name, 7) if obj else self
    def __set__(self, obj, v): setattr(obj, self.name, v)
class Env(SmallEnv):
    field = Field()
    __x = 3
    def __getattr__(self, name):
        if name == "dyn": return 4
        raise AttributeError(name)
    def value(self, a):
        self.field = self.field + 1
        return Mine.made + self.field + self.__x + self.dyn
""",
    "closures and decorators": """
import contextlib, functools
@contextlib.contextmanager
def quiet():
    yield 3
def counted(f):
    @functools.wraps(f)
    def inner(*a):
        inner.calls += 1
        return f(*a)
    inner.calls = 0
    return inner
@counted
def f(x): return x
class Env(SmallEnv):
    def value(self, a):
        with quiet() as q: return f(a) + (f.calls > 0) + q
""",
    "pickles and copies in the env": """
import pickle, copy
class Thing:
    def __init__(self): self.x = 2
class Env(SmallEnv):
    def value(self, a): return pickle.loads(pickle.dumps(Thing())).x + copy.deepcopy(Thing()).x
""",
    "registered by a name of the script": """
class Env(SmallEnv):
    def value(self, a): return 2 * a
gymnasium.register("ByName-v0", entry_point="__main__:Env")
def make(): return gymnasium.make("ByName-v0", disable_env_checker=True)
""",
    "wrappers": """
class Scale(gymnasium.RewardWrapper):
    def reward(self, r): return 2 * r
class Env(SmallEnv): pass
def make(): return gymnasium.wrappers.TimeLimit(Scale(Env()), 5)
""",
}

BY_NAME = {
    "settings of modules that the script alone shows": """
import small_settings as settings
gymnasium.logger.min_level = 40
def main():
    settings.array[0] = 4.0
main()
class Env(SmallEnv):
    def value(self, a):
        return gymnasium.logger.min_level + settings.array[0]
""",
    "library with settings": """
import ctypes
LIB = ctypes.CDLL(os.path.abspath("sim.so"))
LIB.sim_init.argtypes = [ctypes.c_double]
LIB.sim_gravity.restype = ctypes.c_double
code = LIB.sim_init(9.81)
class Env(SmallEnv):
    def value(self, a):
        return a * LIB.sim_gravity()
""",
    "callback for a library": """
import ctypes
LIB = ctypes.CDLL("./sim.so")
CALLBACK = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double)
LIB.sim_call.argtypes = [CALLBACK, ctypes.c_double]
LIB.sim_call.restype = ctypes.c_double
@CALLBACK
def tripled(x): return 3 * x
class Env(SmallEnv):
    def value(self, a): return LIB.sim_call(tripled, a)
""",
    "locks, queues and threads": """
import threading, queue, contextvars, asyncio
from concurrent.futures import ThreadPoolExecutor
LOCK = threading.Lock()
LOCAL = threading.local()
POOL = ThreadPoolExecutor(1)
QUEUE = queue.Queue()
VAR = contextvars.ContextVar("VAR", default=3)
LOOP = asyncio.new_event_loop()
class Env(SmallEnv):
    _lock = threading.RLock()
    async def go(self, a): return a
    def value(self, a):
        with LOCK, self._lock:
            LOCAL.x = a; QUEUE.put(a)
            return POOL.submit(abs, -a).result() + QUEUE.get() + LOCAL.x + VAR.get() + LOOP.run_until_complete(self.go(a))
""",
    "files and connections": """
import mmap, socket, sqlite3
BYTES = open(os.__file__, "rb")
OUT = open(os.devnull, "w")
DB = sqlite3.connect(":memory:", check_same_thread=False)
MAP = mmap.mmap(-1, 100)
SOCKET = socket.socket()
class Env(SmallEnv):
    def value(self, a):
        OUT.write("x"); BYTES.seek(0)
        return len(BYTES.read(5)) + DB.execute("select 3").fetchone()[0] + MAP[0] + (SOCKET.fileno() > 0)
""",
    "generator, and a function of numpy": """
def numbers():
    while True: yield 4
NUMBERS = numbers()
SQUARE = np.frompyfunc(lambda x: x * x, 1, 1)
class Env(SmallEnv):
    def value(self, a): return next(NUMBERS) + SQUARE(a)
""",
    "classes of two worlds": """
import enum, threading
class Mode(enum.Enum):
    FAST = 1
class Config:
    def __init__(self, mode): self.mode = mode
LOCK = threading.Lock()
CONFIG = Config(Mode.FAST)
class Env(SmallEnv):
    def __init__(self, config):
        assert isinstance(config, Config)
        self.config, self.lock = config, LOCK
    def value(self, a): return a + (self.config.mode is Mode.FAST)
    def info(self): return {"mode": self.config.mode, "same": self.config.mode is Mode.FAST}
def make_config(mode): return lambda: Env(CONFIG if mode is Mode.FAST else None)
make = make_config(Mode.FAST)
""",
    "lambda that uses a lock, and what is defined below the guard": """
import threading
LOCKS = {"one": threading.Lock()}
class Env(SmallEnv):
    def __init__(self, offset=0): self.offset = offset
    def value(self, a): return a + self.offset
def making(offset):
    def make():
        with LOCKS["one"]: return Env(offset + EXTRA)
    return make
if __name__ == "__main__":
    EXTRA = 5
    make = making(3)
""",
    "registered class that cannot travel": """
import threading
LOCK = threading.Lock()
class Env(SmallEnv):
    def value(self, a):
        with LOCK: return a
gymnasium.register("ByClass-v0", entry_point=Env)
def make(): return gymnasium.make("ByClass-v0", disable_env_checker=True)
""",
    "type hints of what does not travel": """
import typing
class Side:
    x = 3
class Config:
    side: "Side"
class Env(SmallEnv):
    def value(self, a): return typing.get_type_hints(Config)["side"].x + a
""",
    "class made with arguments": """
class Need:
    def __init_subclass__(cls, *, kind, **kw):
        super().__init_subclass__(**kw); cls.kind = kind
class Wants(Need, kind=5): pass
class Env(SmallEnv):
    def value(self, a): return Wants.kind + a
""",
}
