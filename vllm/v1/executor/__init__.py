"""Runs workers: in this process, for now."""

from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

__all__ = ["Executor", "UniProcExecutor"]
