# Exported from chapters/15_measuring.py (a4a7d21f): edit the chapter.
"""Prefix caches of other engines, to be measured in the process that measures ours.

Taken from what is installed, or from a wheel or folder that need not be installed. Only
the modules of the cache are run. What else these import (kernels, configuration,
servers) is replaced by stand-ins.
"""

import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import distributions
from types import ModuleType, SimpleNamespace
from typing import Any

from minivllm.options import check_choice


class AnyName(type):
    """The type of stand-ins: a name that is asked for is there, a stand-in itself."""

    def __getattr__(cls, name: str) -> Any:
        return stand_in(name)


class Blank(metaclass=AnyName):
    """What a stand-in and its instances do: take anything, do nothing."""

    def __init__(self, *args: object, **named: object) -> None: ...

    def __init_subclass__(cls, **named: object) -> None: ...

    def __class_getitem__(cls, item: object) -> Any:
        return cls

    def __getattr__(self, name: str) -> Any:
        return stand_in(name)

    def __call__(self, *args: object, **named: object) -> Any:
        return self


def stand_in(name: str) -> Any:
    """A class to call, to inherit from, to take names from; no special methods."""
    if name.startswith("__"):
        raise AttributeError(name)
    return AnyName(name, (Blank,), {})


class StandIns(MetaPathFinder, Loader):
    """An import hook: chosen modules are real, what they import may not be."""

    def __init__(self, package: str, place: str, real: Sequence[str]) -> None:
        self.package, self.place = package, place
        self.real = {f"{package}.{name}" for name in real}
        self.others = list(sys.meta_path)
        self.made: list[str] = []

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """None where the ordinary finders shall go on; else a stand-in."""
        inside = fullname.partition(".")[0] == self.package
        if fullname in self.real or (not inside and self._leave(fullname, path)):
            return None
        spec = ModuleSpec(fullname, self, is_package=True)
        folders = [self.place, *fullname.split(".")]
        spec.submodule_search_locations = ["/".join(folders)]
        return spec

    def _leave(self, name: str, path: Sequence[str] | None) -> bool:
        """Whether another package is no concern of ours: it exists, or we are done."""
        return not self.others or any(f.find_spec(name, path) for f in self.others)

    def exec_module(self, module: ModuleType) -> None:
        """Give a stand-in module every name; real submodules are themselves."""
        self.made.append(module.__name__)

        def find(name: str) -> Any:
            full = f"{module.__name__}.{name}"
            return import_module(full) if full in self.real else stand_in(name)

        module.__dict__["__getattr__"] = find


@contextmanager
def standing_in(hook: StandIns) -> Iterator[None]:
    """Import with stand-ins; afterwards they answer for the one package only."""
    sys.meta_path.insert(0, hook)
    try:
        yield
    finally:
        hook.others.clear()
        for name in hook.made:
            if name.partition(".")[0] != hook.package:
                del sys.modules[name]


REAL = {  # the modules that are run; all others of the package are stand-ins
    "sglang": [
        f"srt.mem_cache.{name}"
        for name in (
            *("radix_cache", "base_prefix_cache", "cache_init_params"),
            *("events", "utils", "evict_policy"),
        )
    ],
    "vllm": [
        *("utils", "utils.hashing", "utils.math_utils", "v1.utils", "v1.request"),
        *("v1.kv_cache_interface", "v1.kv_cache_layout", "v1.kv_cache_spec_registry"),
        *("v1.structured_output.request", "v1.core.block_pool"),
        *("v1.core.kv_cache_coordinator", "v1.core.kv_cache_manager"),
        *("v1.core.kv_cache_metrics", "v1.core.kv_cache_utils"),
        "v1.core.single_type_kv_cache_manager",
    ],
}


class PeerAbsent(Exception):
    """A peer cannot be measured here; the message says why."""


@cache
def load_peer(name: str, places: tuple[str, ...] = ()) -> str:
    """Import a peer's cache from `places` (wheels, folders) or what is installed.

    Returns its version. Raises `PeerAbsent` where it cannot be had.
    """
    found = next(iter(distributions(name=name, path=[*places, *sys.path])), None)
    if found is None:
        where = f"not in {', '.join(places)}" if places else "no --peer-path"
        raise PeerAbsent(f"not installed, {where}")
    place = str(found.locate_file("")).rstrip("/")
    try:
        import torch  # both keep or describe tensors

        torch.set_num_threads(1)
        with standing_in(StandIns(name, place, REAL[name])):
            for module in REAL[name]:
                import_module(f"{name}.{module}")
    except Exception as error:  # another version may fail in any way
        told = f"{type(error).__name__}: {error}"
        raise PeerAbsent(f"{found.version} does not load: {told}") from error
    return found.version


class SglangTree:
    """SGLang's `RadixCache`, through its public methods (0.5.23)."""

    def __init__(self, page_size: int) -> None:
        import torch

        self.torch = torch
        self.api = import_module("sglang.srt.mem_cache.base_prefix_cache")
        module = import_module("sglang.srt.mem_cache.radix_cache")
        allocator = SimpleNamespace(
            device=torch.device("cpu"), free_segment=lambda *args, **named: None
        )
        self.new_key = module.RadixKey
        self.tree = module.RadixCache.create_simulated(
            mock_allocator=allocator, page_size=page_size
        )

    def encode(self, token_ids: Sequence[int]) -> tuple[Any, Any]:
        """The ids in 64 bits; a slot for each token, in a tensor."""
        return array("q", token_ids), self.torch.arange(len(token_ids))

    def match(self, key: tuple[Any, Any]) -> int:
        """Look up; the tokens found."""
        asked = self.api.MatchPrefixParams(key=self.new_key(key[0]))
        return int(self.tree.match_prefix(asked).device_prefix_len)

    def insert(self, key: tuple[Any, Any]) -> int:
        """Enter; the tokens that were there."""
        given = self.api.InsertParams(key=self.new_key(key[0]), value=key[1])
        return int(self.tree.insert(given).prefix_len)

    def evict(self, num_tokens: int) -> int:
        """Make room; the tokens that went."""
        asked = self.api.EvictParams(num_tokens=num_tokens)
        return int(self.tree.evict(asked).num_tokens_evicted)

    def untraced_bytes(self) -> int:
        """What its tensors hold."""
        nodes, total = list(self.tree.root_node.children.values()), 0
        while nodes:
            node = nodes.pop()
            total += node.value.untyped_storage().nbytes()
            nodes += node.children.values()
        return total


class VllmManager:
    """vLLM's `KVCacheManager` for one group of attention layers (0.32)."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        import torch

        spec = import_module("vllm.v1.kv_cache_interface")
        utils = import_module("vllm.v1.core.kv_cache_utils")
        sha256 = import_module("vllm.utils.hashing").sha256
        utils.init_none_hash(sha256)
        layers = spec.FullAttentionSpec(
            block_size=page_size, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        config = spec.KVCacheConfig(
            num_blocks=num_pages + 1,  # it keeps one for itself
            kv_cache_tensors=[],
            kv_cache_groups=[spec.KVCacheGroupSpec(["layer"], layers)],
        )
        manager = import_module("vllm.v1.core.kv_cache_manager").KVCacheManager
        self.manager = manager(config, 2**20, page_size, page_size)
        self.hash_blocks = utils.get_request_block_hasher(page_size, sha256)
        self.new_request = import_module("vllm.v1.request").Request
        self.num_requests = 0

    def request(self, token_ids: Sequence[int]) -> Any:
        """A request whose blocks have no hashes yet."""
        params = SimpleNamespace(
            max_tokens=1,
            extra_args=None,
            structured_outputs=None,
            skip_reading_prefix_cache=False,
        )
        self.num_requests += 1
        return self.new_request(str(self.num_requests), list(token_ids), params, None)

    def serve(self, request: Any) -> int:
        """Hash, look up, allocate, free; the tokens found."""
        request.block_hashes = self.hash_blocks(request)
        blocks, found, _ = self.manager.get_computed_blocks(request)
        missing = request.num_tokens - found
        given = self.manager.allocate_slots(request, missing, found, blocks)
        assert given is not None, "out of blocks"
        self.manager.free(request)
        return int(found)


@dataclass
class Guests:
    """The peers that are here, as contestants, and what is to be said of each."""

    versions: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    trees: dict[str, Callable[[int], SglangTree]] = field(default_factory=dict)
    managers: dict[str, Callable[[int, int], VllmManager]] = field(default_factory=dict)


def invite(names: Sequence[str], places: Sequence[str] = ()) -> Guests:
    """Load peers by name; `ValueError` for a name that nobody has an adapter for."""
    guests = Guests()
    for name in names:
        check_choice("peer", name, REAL)
        try:
            guests.versions[name] = load_peer(name, tuple(places))
        except PeerAbsent as reason:
            guests.absent[name] = str(reason)
    guests.trees = {"sglang": SglangTree} if "sglang" in guests.versions else {}
    guests.managers = {"vllm": VllmManager} if "vllm" in guests.versions else {}
    return guests
