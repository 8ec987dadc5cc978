"""Asynchronous client of a rollout server: the part of SGLang's HTTP API that the loop uses, typed.

It works against any engine that serves this part. Two headers, which SGLang ignores, let an engine refuse a
client of another run or another site table; the engine's random instance id, in a header and in the model
info, tells that a server was restarted and so lost its weights and whatever it was generating.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import aiohttp
from torch import Tensor

from tracerl.api.constants import Reason
from tracerl.api.errors import JobError, first_line
from tracerl.engines.weight_group import WeightGroup, dtype_name
from tracerl.records.pairing import RecordEntry, read_entries

SITE_TABLE_HEADER = "X-TraceRL-Site-Table"
"""Request: digest of the site table that the client expects."""
RUN_HEADER = "X-TraceRL-Run"
"""Request: run id of the client; a server serves the run that pushed its weights last."""
INSTANCE_HEADER = "X-TraceRL-Instance"
"""Response: random id of the server process."""

_CONNECT_SECONDS = 5.0
_CONTROL_SECONDS = 30.0
# Only requests that may be sent twice are repeated, after these pauses.
_RETRY_PAUSES = (0.05, 0.2, 0.8)


class RolloutError(JobError):
    """A rollout refused a request or answered with something else than its API promises."""

    def __init__(
        self, message: str, *, reason: str = Reason.ROLLOUT_FAILED, status: int | None = None
    ) -> None:
        super().__init__(reason, message)
        self.status = status
        """HTTP status; None when there was no answer."""


class RolloutUnreachableError(RolloutError):
    """No answer: the server is gone, was restarted while it worked, or took too long."""


class InstanceChangedError(RolloutError):
    """Another process answers than the one that `connect` saw: weights and running requests are lost."""


@dataclass(frozen=True)
class RolloutInfo:
    """What a server says about itself; None where an engine does not know the field."""

    instance_id: str | None
    weight_version: int | None
    """None before version 0 was pushed."""
    site_table: str | None
    engine: str | None
    cpu_seconds: float | None
    """CPU time of its processes so far."""
    ranks: int = 1
    """Processes that take weights."""
    gpu_seconds: float | None = None
    """What its passes took of the GPU so far."""


@dataclass(frozen=True)
class Sampling:
    """How one request samples."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 takes the most probable token."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends with, and includes, the first of these."""
    seed: int | None = None
    """The same seed gives the same tokens in the reference engine; None draws one."""

    def json(self) -> dict[str, Any]:
        """SGLang's `sampling_params`."""
        params: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "stop_token_ids": list(self.stop_token_ids),
        }
        if self.seed is not None:
            params["sampling_seed"] = self.seed
        return params


@dataclass(frozen=True)
class Generation:
    """One finished (or aborted) request; lists have one entry a generated token."""

    id: str
    prompt_tokens: int
    tokens: list[int]
    logp: list[float]
    """Nats, of the distribution that was sampled from."""
    versions: list[int]
    """Policy version that sampled each token."""
    finish_reason: str
    """stop, length or abort."""
    records: list[RecordEntry]
    seconds: Mapping[str, float]
    """What recording this trajectory cost the server: CPU seconds of capture, pack and put."""


class RolloutClient:
    """Client of one rollout server; use it as an asynchronous context manager in one event loop."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        run_id: str | None = None,
        site_table: str | None = None,
        generation_seconds: float = 3600.0,
        weights_seconds: float = 600.0,
    ) -> None:
        """Prepare; nothing is sent.

        `generation_seconds` bounds one `generate` call, `weights_seconds` one weight transfer.
        """
        self.url = url.rstrip("/")
        self.instance_id: str | None = None
        self._headers = {"Authorization": f"Bearer {token}"}
        if run_id is not None:
            self._headers[RUN_HEADER] = run_id
        if site_table is not None:
            self._headers[SITE_TABLE_HEADER] = site_table
        self._generation_seconds, self._weights_seconds = generation_seconds, weights_seconds
        self._session: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"RolloutClient({self.url})"

    async def __aenter__(self) -> Self:
        # Without a limit on connections: each request of a batch may have its own, and waits for its tokens.
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # -- who answers --------------------------------------------------------------------------------------

    async def health(self) -> bool:
        """Tell whether a server answers that it is well; InstanceChangedError when another one answers."""
        try:
            await self._call("GET", "/health", seconds=_CONNECT_SECONDS)
        except InstanceChangedError:
            raise
        except RolloutError:
            return False
        return True

    async def info(self) -> RolloutInfo:
        """Read what the server says about itself; never raises InstanceChangedError."""
        answer = await self._call("GET", "/get_model_info", repeat=True, check_instance=False)
        if not isinstance(answer, dict):
            raise self._wrong("/get_model_info", "is not an object")
        version = answer.get("weight_version")
        return RolloutInfo(
            instance_id=answer.get("instanceId"),
            weight_version=int(version) if isinstance(version, str) and version.isdecimal() else None,
            site_table=answer.get("siteTable"),
            engine=answer.get("engine"),
            cpu_seconds=answer.get("cpuSeconds"),
            ranks=answer.get("ranks", 1),
            gpu_seconds=answer.get("gpuSeconds"),
        )

    async def connect(self) -> RolloutInfo:
        """Adopt the process that answers now: at the start, and after InstanceChangedError."""
        info = await self.info()
        self.instance_id = info.instance_id
        return info

    async def metrics(self) -> str:
        """Read the server's metrics in Prometheus' text format."""
        return str(await self._call("GET", "/metrics", repeat=True))

    # -- generation ---------------------------------------------------------------------------------------

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, id: str) -> Generation:
        """Generate one trajectory. `id` is unique among the trajectories of a job; cancelling aborts it."""
        return (await self.generate_batch([prompt], [sampling], ids=[id]))[0]

    async def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[Sampling],
        *,
        ids: Sequence[str],
        record: bool = True,
    ) -> list[Generation]:
        """Generate trajectories with one HTTP request, which returns when the last of them is done.

        Without `record`, nothing is recorded of them, but by SGLang's Native numerics.
        """
        body = {
            "rid": list(ids),
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": [params.json() for params in sampling],
            "return_logprob": True,
            **({} if record else {"record": False}),
        }
        answer = await self._call("POST", "/generate", body, seconds=self._generation_seconds)
        if not isinstance(answer, list) or len(answer) != len(ids):
            raise self._wrong("/generate", f"does not hold {len(ids)} generations")
        try:
            return [
                _generation(item, id, len(prompt))
                for item, id, prompt in zip(answer, ids, prompts, strict=True)
            ]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self._wrong("/generate", f"has a malformed generation ({error!r})") from None

    async def pause_generation(self, mode: Literal["abort", "retract"]) -> None:
        """Stop after the current step: end what runs (abort), or keep its tokens for later (retract)."""
        await self._call("POST", "/pause_generation", {"mode": mode}, repeat=True)

    async def continue_generation(self) -> None:
        """Go on after `pause_generation`; what was retracted is prefilled again under the current weights."""
        await self._call("POST", "/continue_generation", {}, repeat=True)

    async def abort(self, id: str | None = None) -> None:
        """End one request, or all (None); their calls return with finish reason abort."""
        await self._call("POST", "/abort_request", {"rid": id or "", "abort_all": id is None}, repeat=True)

    async def flush_cache(self) -> None:
        """Forget cached prefixes; refused while requests run."""
        await self._call("POST", "/flush_cache", {}, repeat=True)

    # -- weights ------------------------------------------------------------------------------------------

    async def begin_weight_update(self) -> None:
        """Open an update; refused while requests run. It also makes this client's run the server's."""
        await self._update("/begin_weight_update", {})

    async def end_weight_update(self, version: int) -> None:
        """Close the update: the server checks that all weights came, and computes with them as `version`."""
        await self._update("/end_weight_update", {"weight_version": str(version)})

    async def update_weights_from_disk(self, directory: str, version: int) -> None:
        """Let the server read a directory of *.safetensors that it can see."""
        await self._update(
            "/update_weights_from_disk", {"model_path": directory, "weight_version": str(version)}
        )

    async def init_weights_update_group(
        self, address: str, port: int, *, rank: int, world_size: int, name: str
    ) -> None:
        """Let the server join a `WeightGroup` from `rank` on; returns when the whole group has met."""
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": rank,
            "world_size": world_size,
            "group_name": name,
            "backend": "gloo",
        }
        await self._update("/init_weights_update_group", body)

    async def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        group: str,
        version: int,
    ) -> None:
        """Let the server receive one broadcast a tensor, in this order."""
        body = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group,
            "weight_version": str(version),
        }
        await self._update("/update_weights_from_distributed", body)

    # -- plumbing -----------------------------------------------------------------------------------------

    async def _update(self, path: str, body: dict[str, Any]) -> None:
        try:
            answer = await self._call("POST", path, body, seconds=self._weights_seconds)
        except RolloutError as error:
            if error.status == 400:
                raise RolloutError(str(error), reason=Reason.WEIGHT_SYNC_FAILED, status=400) from None
            raise
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise RolloutError(
                f"{self.url}{path} did not say that it succeeded; see the rollout's log",
                reason=Reason.WEIGHT_SYNC_FAILED,
            )

    async def _call(
        self,
        method: Literal["GET", "POST"],
        path: str,
        body: dict[str, Any] | None = None,
        *,
        seconds: float = _CONTROL_SECONDS,
        repeat: bool = False,
        check_instance: bool = True,
    ) -> Any:
        pauses = _RETRY_PAUSES if repeat else ()
        for pause in pauses:
            try:
                return await self._once(method, path, body, seconds, check_instance)
            except RolloutUnreachableError:
                await asyncio.sleep(pause)
        return await self._once(method, path, body, seconds, check_instance)

    async def _once(
        self, method: str, path: str, body: dict[str, Any] | None, seconds: float, check_instance: bool
    ) -> Any:
        if self._session is None:
            raise RuntimeError("enter the client (async with) before using it")
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_SECONDS)
        try:
            async with self._session.request(method, self.url + path, json=body, timeout=timeout) as response:
                if check_instance:
                    self._check_instance(response.headers.get(INSTANCE_HEADER))
                raw = await response.read()
                status, is_json = response.status, response.content_type == "application/json"
        except TimeoutError:
            raise RolloutUnreachableError(
                f"{self.url}{path} gave no answer within {seconds:g} s; see the rollout's log"
            ) from None
        except aiohttp.ClientError as error:
            raise RolloutUnreachableError(
                f"{self.url}{path} cannot be reached ({error or type(error).__name__}); see the rollout's log"
            ) from None
        try:
            answer = json.loads(raw) if is_json else raw.decode("utf-8")
        except ValueError:
            raise self._wrong(path, "is not JSON") from None
        if status != 200:
            raise self._refused(path, status, answer)
        return answer

    def _check_instance(self, answered: str | None) -> None:
        if answered is not None and self.instance_id is not None and answered != self.instance_id:
            raise InstanceChangedError(
                f"the rollout at {self.url} was restarted (instance {answered}, was {self.instance_id}); "
                "push the weights again"
            )

    def _refused(self, path: str, status: int, answer: Any) -> RolloutError:
        error: Any = answer.get("error", answer) if isinstance(answer, dict) else answer
        reason: Any = None
        if isinstance(error, dict):
            error, reason = error.get("message"), error.get("reason")
        text = str(error or "it gave no reason").strip()[:500]
        # A value that is not finite is the model's, whichever rollout met it first.
        sentence = text if reason == Reason.NON_FINITE else f"{self.url}{path} answered {status}: {text}"
        return RolloutError(sentence, reason=reason or Reason.ROLLOUT_FAILED, status=status)

    def _wrong(self, path: str, what: str) -> RolloutError:
        return RolloutError(f"the answer of {self.url}{path} {what}; is this a rollout server?")


def _generation(item: Mapping[str, Any], id: str, prompt_tokens: int) -> Generation:
    meta = item["meta_info"]
    tokens = [int(token) for token in item["output_ids"]]
    pairs = meta["output_token_logprobs"]
    if [pair[1] for pair in pairs] != tokens:
        raise ValueError("log-probs are not of the tokens")
    versions: list[int] = []
    for span in meta["weight_versions"]:
        if span["start"] != len(versions):
            raise ValueError("weight_versions has a hole")
        versions += [int(span["version"])] * (span["end"] - span["start"])
    if len(versions) != len(tokens):
        raise ValueError("weight_versions does not cover the tokens")
    return Generation(
        id=id,
        prompt_tokens=prompt_tokens,
        tokens=tokens,
        logp=[float(pair[0]) for pair in pairs],
        versions=versions,
        finish_reason=str(meta["finish_reason"]["type"]),
        records=read_entries(meta.get("records")),
        seconds=dict(meta.get("seconds", {})),
    )


async def push_from_disk(clients: Sequence[RolloutClient], directory: str, version: int) -> None:
    """Update all rollouts from a directory of *.safetensors; they must be paused or idle."""

    async def push(client: RolloutClient) -> None:
        await client.begin_weight_update()
        await client.update_weights_from_disk(directory, version)
        await client.end_weight_update(version)

    await _all(push(client) for client in clients)


class Broadcaster:
    """The sending side of weight updates by broadcast: rank 0 of a group with all ranks of all rollouts."""

    def __init__(self, clients: Sequence[RolloutClient], group: WeightGroup) -> None:
        self._clients, self._group = clients, group

    @classmethod
    async def open(
        cls,
        clients: Sequence[RolloutClient],
        *,
        address: str,
        port: int = 0,
        name: str = "weight_update_group",
        timeout_seconds: float = 300.0,
    ) -> Broadcaster:
        """Meet the rollouts, which reach this process at `address`; port 0 takes a free one.

        RolloutError when one of them cannot join within the timeout.
        """
        ranks = [info.ranks for info in await asyncio.gather(*(client.info() for client in clients))]
        world = 1 + sum(ranks)
        try:
            group = WeightGroup(
                address, port, rank=0, world_size=world, name=name, timeout_seconds=timeout_seconds
            )
        except RuntimeError as error:
            raise RolloutError(
                f"a weight group cannot listen at {address}:{port} ({first_line(error)}); give another port",
                reason=Reason.WEIGHT_SYNC_FAILED,
            ) from None
        joins = [
            client.init_weights_update_group(address, group.port, rank=first, world_size=world, name=name)
            for first, client in zip(itertools.accumulate(ranks, initial=1), clients, strict=False)
        ]
        await _all([*joins, _blocking(group.join)])
        return cls(clients, group)

    async def push(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Update all rollouts, which must be paused or idle, with (Hugging Face name, tensor) pairs."""
        tensors = {name: tensor.detach().contiguous() for name, tensor in weights}
        names = list(tensors)
        dtypes = [dtype_name(tensor.dtype) for tensor in tensors.values()]
        shapes = [list(tensor.shape) for tensor in tensors.values()]

        def send() -> None:
            for tensor in tensors.values():
                self._group.broadcast(tensor)

        await _all(client.begin_weight_update() for client in self._clients)
        receiving = [
            client.update_weights_from_distributed(
                names, dtypes, shapes, group=self._group.name, version=version
            )
            for client in self._clients
        ]
        await _all([*receiving, _blocking(send)])
        await _all(client.end_weight_update(version) for client in self._clients)


async def _blocking(call: Any) -> None:
    """Run a blocking member of the weight group beside the event loop."""
    try:
        await asyncio.to_thread(call)
    except RuntimeError as error:
        raise RolloutError(
            f"the weight group broke ({first_line(error)}); see the rollouts' logs",
            reason=Reason.WEIGHT_SYNC_FAILED,
        ) from None


async def _all(coroutines: Iterable[Any]) -> None:
    """Wait for all, then raise the first error: what a rollout said comes before what the group noticed."""
    results = await asyncio.gather(*coroutines, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
