"""Whom pdrt's router is measured against: routers that run already, or peers that are started."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pdrt.bench.router_process import HOST, Program
from pdrt.errors import ConfigError
from pdrt.up.place import free_port

_BOOTSTRAP: Final = "8998"  # nobody is there: scripted backends hand over nothing
_MODULES: Final = {"sglang-router": "sglang_router", "vllm-router": "vllm_router"}
_FIND_S: Final = 60.0


async def installed(python: str) -> list[str]:
    """The peers that this interpreter can import. Raises ConfigError when it has none of them."""
    found = [name for name, module in _MODULES.items() if await _imports(python, module)]
    if not found:
        install = f"{python} -m pip install sglang-router==0.3.2 vllm-router==0.1.17"
        raise ConfigError(f"--peer-python {python}: no peer is installed there; {install}")
    return found


async def _imports(python: str, module: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec('{module}') is None)"
    try:
        process = await asyncio.create_subprocess_exec(
            python, "-c", code, stderr=asyncio.subprocess.DEVNULL
        )
    except OSError as error:
        raise ConfigError(f"--peer-python {python}: {error.strerror}") from error
    async with asyncio.timeout(_FIND_S):
        return await process.wait() == 0


def program(name: str, python: str, prefill: Sequence[int], decode: Sequence[int]) -> Program:
    """How a peer is started in front of these backends."""
    port = free_port(HOST)
    behind: list[str] = []
    for each in prefill:
        behind += ["--prefill", f"http://{HOST}:{each}", _BOOTSTRAP]
    for each in decode:
        behind += ["--decode", f"http://{HOST}:{each}"]
    told = ["--host", HOST, "--port", str(port), *behind]
    told += ["--prometheus-host", HOST, "--prometheus-port", str(free_port(HOST))]
    if name == "sglang-router":
        start = [python, "-m", "sglang_router.launch_router", "--pd-disaggregation"]
    else:
        start = [str(Path(python).parent / "vllm-router"), "--vllm-pd-disaggregation"]
    return Program(name, port, [*start, *told], {"HF_HUB_OFFLINE": "1"})
