"""The C kernels compile wherever a compiler with OpenMP is. All other tests of them skip where they do not."""

import subprocess

import pytest
import torch

from minillm.kernels import native
from minillm.kernels.native_build import compile_shared
from minillm.kernels.native_structs import KV_FLAGS

ABSENT = "no-such-header.h"


@pytest.fixture(scope="module")
def compiler(tmp_path_factory) -> str:
    """One that compiles OpenMP with the flags of the kernels."""
    found = native.shutil.which(native.os.environ.get("CC", "gcc")) or native.shutil.which("clang")
    if found is None or not native.sys.platform.startswith("linux") or native.os.environ.get("MINILLM_NATIVE") == "0":
        pytest.skip("no C compiler, or the kernels are switched off")
    folder = tmp_path_factory.mktemp("openmp")
    (folder / "program.c").write_text("#include <omp.h>\nint threads(void) { return omp_get_max_threads(); }\n")
    try:
        compile_shared(found, native.FLAGS, folder / "program.c", folder / "program.so")
    except subprocess.CalledProcessError:
        pytest.skip(f"{found} has no OpenMP")
    return found


@pytest.mark.parametrize("kv_dtype", [None, *KV_FLAGS], ids=str)
@pytest.mark.parametrize("dtype", native.DTYPES, ids=str)
def test_the_kernels_compile(compiler, dtype, kv_dtype):
    assert native.library(dtype, kv_dtype) is not None


def test_a_compiler_that_refuses_is_named_with_its_first_error(compiler, monkeypatch):
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-include", ABSENT))
    with pytest.warns(RuntimeWarning, match=f"{compiler} does not compile.*{ABSENT}.*MINILLM_NATIVE=0"):
        assert native.library.__wrapped__(torch.float32) is None
