"""Ways to decode, side by side: Hugging Face's own and our engine's. Each answers a prompt greedily and says how long it took.

An answer ends at an end-of-sequence token or at `max_tokens`, in every arm alike.
"""

from __future__ import annotations

import inspect
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, StaticCache
from transformers.generation.streamers import BaseStreamer

from runtime.backends import load_target
from runtime.backends.base import Target
from runtime.config import BackendConfig, DrafterConfig, ModelConfig, SessionsConfig, SpeculationConfig
from runtime.drafters.loading import load_drafter
from runtime.engine.local import LocalEngine
from runtime.models import ResolvedModel, Tokenizer
from runtime.threads import give_back_team
from runtime.types import Done, Event, Failed, SamplingParams, SpeculationStats, Tokens

PATIENCE_S = 600.0


@dataclass
class Answer:
    """What one request gave and took. Times are those of time.perf_counter."""

    began_at: float
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # when each token came; those of one step came together
    ended_at: float = 0.0  # when the next request could begin
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def seconds(self) -> float:
        return self.ended_at - self.began_at

    @property
    def decode_rate(self) -> float:
        """Tokens per second behind the first step's; what prefilling took does not count."""
        return self.num_between(self.times[0], self.times[-1]) / max(self.times[-1] - self.times[0], 1e-9)

    @property
    def step_seconds(self) -> float:
        """Between two steps that brought tokens, on average."""
        return (self.times[-1] - self.times[0]) / max(len(set(self.times)) - 1, 1)

    def num_between(self, after: float, until: float) -> int:
        """Tokens that came in this time."""
        return sum(after < at <= until for at in self.times)

    def add(self, token_ids: Sequence[int]) -> None:
        self.ended_at = time.perf_counter()
        self.token_ids.extend(token_ids)
        self.times.extend([self.ended_at] * len(token_ids))


class Arm(Protocol):
    name: str

    def answer(self, prompt: Sequence[int], max_tokens: int) -> Answer: ...


def read_plain(resolved: ResolvedModel, dtype: torch.dtype, device: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(resolved.path, dtype=dtype, local_files_only=True).to(device).eval()


class HfGenerate:
    """`model.generate`, as its users call it."""

    name = "HF generate"

    def __init__(self, model: Any, eos_token_ids: Sequence[int]) -> None:
        self._model, self._eos = model, list(eos_token_ids)

    @torch.inference_mode()
    def answer(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        ids = torch.tensor([list(prompt)], device=self._model.device)
        answer = Answer(time.perf_counter())
        settings = {"do_sample": False, "max_new_tokens": max_tokens, "eos_token_id": self._eos, "pad_token_id": self._eos[0]}
        self._model.generate(ids, attention_mask=torch.ones_like(ids), streamer=_Clock(answer), **settings)
        give_back_team()  # or the other arms would wait for their threads asleep
        return answer


class _Clock(BaseStreamer):
    """Hears of each token as it is made; the first call brings the prompt."""

    def __init__(self, answer: Answer) -> None:
        self._answer, self._is_prompt = answer, True

    def put(self, value: torch.Tensor) -> None:
        if not self._is_prompt:
            self._answer.add(value.flatten().tolist())
        self._is_prompt = False

    def end(self) -> None:
        pass


class HfStatic:
    """The fastest that Hugging Face's modules alone give: a static cache and one decoding step, on CUDA captured as a graph.

    There is a cache of each power of two of tokens, since a step attends to all of its cache.
    """

    name = "HF static cache"

    def __init__(self, model: Any, eos_token_ids: Sequence[int]) -> None:
        self._model, self._eos = model, set(eos_token_ids)
        self._by_size: dict[int, StaticSteps] = {}

    @torch.inference_mode()
    def answer(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        size = 1 << (len(prompt) + max_tokens - 1).bit_length()
        if size not in self._by_size:
            self._by_size[size] = StaticSteps(self._model, size)
        steps = self._by_size[size]
        answer = Answer(time.perf_counter())
        answer.add(steps.prefill([prompt]))
        while len(answer.token_ids) < max_tokens and answer.token_ids[-1] not in self._eos:
            answer.add(steps.next())
        return answer


class StaticSteps:
    """Greedy steps of `num` sequences of one length over a cache of `size` tokens each; the last tokens and their position stay
    on the device."""

    def __init__(self, model: Any, size: int, num: int = 1) -> None:
        self._model, self._cache, self._num = model, StaticCache(config=model.config, max_cache_len=size), num
        is_new = "cache" in inspect.signature(type(model).forward).parameters  # its older name is going away
        self._cache_name = "cache" if is_new else "past_key_values"
        self._token = torch.zeros(num, 1, dtype=torch.int64, device=model.device)
        self._position = torch.zeros(1, dtype=torch.int64, device=model.device)
        self._graph = self._captured() if model.device.type == "cuda" else None

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        self._cache.reset()
        self._position.zero_()
        self._run(torch.tensor([list(prompt) for prompt in prompts], device=self._model.device))
        return self._token[:, 0].tolist()

    def next(self) -> list[int]:
        if self._graph is not None:
            self._graph.replay()
        else:
            self._run(self._token)
        return self._token[:, 0].tolist()

    def _run(self, ids: torch.Tensor) -> None:
        at = self._position + torch.arange(ids.shape[1], device=ids.device)
        positions = at[None].expand(self._num, -1)
        cache = {self._cache_name: self._cache}
        out = self._model(ids, cache_position=at, position_ids=positions, use_cache=True, **cache)
        self._token.copy_(out.logits[:, -1:].argmax(-1))
        self._position.add_(ids.shape[1])

    def _captured(self) -> torch.cuda.CUDAGraph:
        self.prefill([[0] * 4] * self._num)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._run(self._token)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run(self._token)
        return graph


class Served:
    """One of our engines with a target and a drafter of its own, so that arms share nothing but the machine."""

    def __init__(
        self,
        resolved: ResolvedModel,
        model: ModelConfig,
        backend: BackendConfig,
        drafter: DrafterConfig,
        speculation: SpeculationConfig,
        max_sessions: int,
    ) -> None:
        self.target: Target = load_target(backend, model, resolved)
        sessions = SessionsConfig(max_sessions=4 * max_sessions, max_batch_sessions=max_sessions, prefix_reuse=False)
        tokenizer = Tokenizer.load(resolved.path)
        self.engine = LocalEngine(self.target, load_drafter(drafter, self.target), tokenizer, speculation, sessions)
        self.engine.start()

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        concurrency: int,
        max_tokens: int | Sequence[int],
        ignore_eos: bool = False,
        **fields: Any,
    ) -> list[Answer]:
        """Answer all prompts, so many at a time; a new one begins as one ends. max_tokens: of all, or of each."""
        limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
        params = SamplingParams(**{"temperature": 0.0, **fields}, ignore_eos=ignore_eos)
        ended: queue.SimpleQueue[_Listener] = queue.SimpleQueue()
        answers = [Answer(0.0) for _ in prompts]
        waiting = iter(range(len(prompts)))

        def begin() -> None:
            index = next(waiting, None)
            if index is not None:
                session = self.engine.create_session().session_id
                self.engine.append(session, prompts[index])
                answers[index].began_at = time.perf_counter()
                limited = replace(params, max_tokens=limits[index])
                self.engine.generate(session, limited, on_event=_Listener(session, answers[index], ended))

        for _ in range(concurrency):
            begin()
        for _ in prompts:
            listener = ended.get(timeout=PATIENCE_S)
            if listener.error is not None:
                raise listener.error
            self.engine.close_session(listener.session)
            begin()
        return answers

    def settled_kv_bytes(self) -> int:
        """What K/V takes once the engine has freed the sessions that were closed."""
        deadline = time.monotonic() + 5.0
        while (num_bytes := self.target.cache_bytes()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return num_bytes

    def stop(self) -> None:
        self.engine.stop()


class _Listener:
    """On the engine's thread: notes when tokens come, and tells when there will be no more."""

    def __init__(self, session: str, answer: Answer, ended: queue.SimpleQueue[_Listener]) -> None:
        self.session = session
        self.error: Exception | None = None
        self._answer, self._ended = answer, ended

    def __call__(self, event: Event) -> None:
        if isinstance(event, Tokens):
            self._answer.add(event.token_ids)
        elif isinstance(event, Done | Failed):
            self._answer.ended_at = time.perf_counter()
            if isinstance(event, Done):
                self._answer.stats = event.speculation
            else:
                self.error = event.error
            self._ended.put(self)


class Ours:
    """One of our engines, one request at a time, with these fields of a request."""

    def __init__(self, name: str, served: Served, **fields: Any) -> None:
        self.name, self._served, self._fields = name, served, fields

    def answer(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        return self._served.run([prompt], 1, max_tokens, **self._fields)[0]
