"""The pool of two workers of the tests of the pipeline."""

from tests.pipeline.conftest import hold, parallel, pool, sdxl_folder

__all__ = ["hold", "parallel", "pool", "sdxl_folder"]
