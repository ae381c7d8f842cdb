"""Clients of a soak: each does things at random and keeps a model of its own of every session that it holds.

What the server says is held against that model: lengths of histories, what is cached, what a repeated request id does, how each
stream ends, what is refused. Whatever is not as it should be goes into the notes; nothing here knows how the server is made.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any

import grpc
from soak_notes import Notes

from runtime.errors import CapacityExhausted, HistoryMismatch, SavedSessionRejected, SessionBusy, SessionNotFound, SlipstreamError
from runtime.rpc.aio import AsyncRuntimeClient
from runtime.rpc.client import new_id
from runtime.rpc.connection import Retry
from runtime.types import (
    CachePolicy,
    Done,
    DrafterPolicy,
    HistoryTruncated,
    SamplingParams,
    SessionInfo,
    SessionOptions,
    Started,
    Tokens,
)

LABEL = "soak"  # of our sessions, and the beginning of the names of those that we save
MAX_HELD = 3  # sessions of one client
MAX_TOKENS = 1500  # of a history that is still continued
SHORT_TTL_S = 0.5
IDLE_WITHIN_S = 30.0
POLL_S = 0.002
LONG = SamplingParams(max_tokens=400, ignore_eos=True)  # to be ended before its end


@dataclass
class Held:
    """A session as its client knows it."""

    session_id: str
    options: SessionOptions
    length: int = 0  # tokens of its history


class Worker:
    """One client over gRPC."""

    def __init__(self, number: int, rng: random.Random, address: str, notes: Notes) -> None:
        self._name = f"{LABEL}-{number}"
        self._rng = rng
        self._address = address
        self._notes = notes
        self._held: list[Held] = []
        self._client: AsyncRuntimeClient
        self._on_one: dict[Callable[[Held], Awaitable[None]], int] = {
            self._append: 4,
            self._append_wrongly: 2,
            self._generate: 6,
            self._meddle: 2,
            self._cancel: 3,
            self._vanish: 1,
            self._run_out_of_time: 3,
            self._close_midway: 2,
            self._fork: 2,
            self._save_and_restore: 1,
            self._close: 1,
        }

    async def run(self, until: float) -> None:
        """until: by time.monotonic(); at the end it closes what it holds."""
        async with self._new_client() as self._client:
            while time.monotonic() < until:
                await self._once()
            for held in list(self._held):
                await self._guard("close", self._close(held))

    def _new_client(self) -> AsyncRuntimeClient:
        return AsyncRuntimeClient(self._address, timeout_s=120.0, retry=Retry(max_attempts=1))

    async def _once(self) -> None:
        if not self._held or (len(self._held) < MAX_HELD and self._rng.random() < 0.1):
            operation = self._abandon if self._rng.random() < 0.1 else self._create
            await self._guard(operation.__name__.strip("_"), operation())
            return
        held = self._rng.choice(self._held)
        if held.length > MAX_TOKENS:
            await self._guard("close", self._close(held))
            return
        [chosen] = self._rng.choices(list(self._on_one), list(self._on_one.values()))
        await self._guard(chosen.__name__.strip("_"), chosen(held), held)

    async def _guard(self, operation: str, work: Awaitable[None], held: Held | None = None) -> None:
        """What may happen to anybody is documented: no room, or a session that had to go. All else is a fault."""
        try:
            await work
        except CapacityExhausted as error:
            self._notes.saw(operation, error.reason)
            await asyncio.sleep(error.retry_after_s * self._rng.random())
        except SessionNotFound as error:
            self._notes.saw(operation, error.reason)
            self._notes.hold(error.reason == "EVICTED_LRU", f"{operation}: {error}")
            self._forget(error.session_id)
        except (SlipstreamError, grpc.RpcError) as error:
            self._notes.hold(False, f"{operation}: {type(error).__name__}: {error}")
            if held is not None:
                self._forget(held.session_id)
                with suppress(SessionNotFound):
                    await self._client.close_session(held.session_id)

    def _forget(self, session_id: str) -> None:
        self._held = [held for held in self._held if held.session_id != session_id]

    # --- sessions ---

    def _options(self) -> SessionOptions:
        policies = [CachePolicy(), CachePolicy(), CachePolicy(4, self._rng.randint(32, 128))]
        drafters = [DrafterPolicy(), DrafterPolicy(), DrafterPolicy("off")]
        return SessionOptions(
            client_label=self._name,
            ttl_s=600.0,
            cache_policy=self._rng.choice(policies),
            drafter_policy=self._rng.choice(drafters),
        )

    async def _create(self) -> None:
        options, request_id = self._options(), new_id()
        info = await self._client.create_session(options, request_id=request_id)
        self._keep(info, options, 0)
        if self._rng.random() < 0.5:
            again = await self._client.create_session(options, request_id=request_id)
            self._notes.hold(again.session_id == info.session_id, "create: one request id made two sessions")
        self._notes.saw("create", "done")

    def _keep(self, info: SessionInfo, options: SessionOptions, length: int) -> None:
        is_so = info.options == options and info.history_length == length
        self._notes.hold(is_so, f"a new session is {info}, and should have {length} tokens and {options}")
        self._held.append(Held(info.session_id, options, length))

    async def _abandon(self) -> None:
        """A session that nobody closes; the server has to."""
        info = await self._client.create_session(replace(self._options(), ttl_s=SHORT_TTL_S))
        await self._client.append(info.session_id, self._some_ids())
        self._notes.saw("abandon", "done")

    async def _close(self, held: Held) -> None:
        self._forget(held.session_id)
        await self._client.close_session(held.session_id)
        await self._check_closed(held)
        self._notes.saw("close", "done")

    async def _check_closed(self, held: Held) -> None:
        for call in (self._client.get_session, self._client.close_session):
            try:
                await call(held.session_id)
                self._notes.hold(False, f"{held} is closed, and {call.__name__} finds it")
            except SessionNotFound as error:
                self._notes.hold(error.reason == "CLOSED", f"{held} was closed, but is said to be {error.reason}")

    async def _check(self, held: Held, *, is_after_turn: bool = False) -> SessionInfo:
        info = await self._client.get_session(held.session_id)
        is_so = info.state == "idle" and info.history_length == held.length and info.cached_tokens <= held.length
        self._notes.hold(is_so, f"{held} is {info}")
        if is_after_turn:
            self._notes.num_given_up += info.cached_tokens == 0
            self._notes.hold(info.cached_tokens in (0, held.length), f"after a turn, {held} is cached in part: {info}")
        return info

    # --- appending ---

    def _some_ids(self) -> list[int]:
        return [self._rng.randrange(3, 250) for _ in range(self._rng.randint(1, 40))]

    async def _append(self, held: Held) -> None:
        request_id, ids = new_id(), self._some_ids()
        for _ in range(self._rng.choice([1, 2])):  # repeated, it is answered as before
            reply = await self._client.append(held.session_id, ids, request_id=request_id, expected_history_length=held.length)
            is_so = reply.history_length == held.length + len(ids)
            self._notes.hold(is_so, f"append: {held} and {len(ids)} tokens make {reply}")
        held.length += len(ids)
        await self._check(held)
        self._notes.saw("append", "done")

    async def _append_wrongly(self, held: Held) -> None:
        wrong: list[tuple[type[SlipstreamError], dict[str, Any]]] = [
            (HistoryMismatch, {"token_ids": [5], "expected_history_length": held.length + 1}),
            (SlipstreamError, {"token_ids": [5, 2**31]}),
            (SlipstreamError, {"token_ids": [5] * 4096}),
        ]
        refusal, request = self._rng.choice(wrong)
        try:
            await self._client.append(held.session_id, **request)
            self._notes.hold(False, f"append: {str(request)[:80]} was taken")
        except refusal as error:
            self._notes.saw("append", error.reason)
        await self._check(held)

    # --- generating ---

    async def _ready(self, held: Held) -> None:
        """A history that is empty generates nothing."""
        if not held.length:
            await self._append(held)

    async def _generate(self, held: Held) -> None:
        await self._ready(held)
        params = SamplingParams(
            max_tokens=self._rng.randint(1, 32),
            temperature=self._rng.choice([0.0, 1.0]),
            ignore_eos=self._rng.random() < 0.7,
            logprobs=self._rng.random() < 0.2,
        )
        stream = self._client.generate(held.session_id, params, expected_history_length=held.length)
        self._take_turn(held, params, [event async for event in stream])
        await self._check(held, is_after_turn=True)

    def _take_turn(self, held: Held, params: SamplingParams, events: list[Any]) -> None:
        """Hold a whole turn against what its session and its settings say."""
        if not (len(events) > 1 and isinstance(events[0], Started) and isinstance(events[-1], Done)):
            self._notes.hold(False, f"a turn of {held} with {params} is {events}")
            return
        started, *middle, done = events
        num_tokens = sum(len(event.token_ids) for event in middle if isinstance(event, Tokens))
        num_told = sum(isinstance(event, HistoryTruncated) for event in middle)
        facts = [
            started.history_length == held.length,
            done.finish_reason in ("stop", "length"),
            done.history_length == held.length + num_tokens,
            (done.usage.prompt_tokens, done.usage.completion_tokens) == (held.length, num_tokens),
            done.finish_reason == "stop" or num_tokens == params.max_tokens,
            num_told <= (held.options.cache_policy.window is not None),
            not params.logprobs or num_tokens == sum(len(event.logprobs) for event in middle if isinstance(event, Tokens)),
        ]
        self._notes.hold(all(facts), f"a turn of {held} with {params}: {facts} for {started}, {done}")
        self._notes.saw("generate", done.finish_reason)
        held.length = done.history_length

    async def _meddle(self, held: Held) -> None:
        """While a session generates, others are refused, whatever they want of it, and change nothing."""
        await self._ready(held)
        params = replace(LONG, max_tokens=40)
        stream = self._client.generate(held.session_id, params, expected_history_length=held.length)
        async with aclosing(aiter(stream)) as reading:
            events = [await anext(reading)]
            try:  # the turn may be over, though we did not read so far
                await self._client.append(held.session_id, [5], expected_history_length=held.length)
                self._notes.hold(False, f"meddle: {held} generates, and takes an append")
            except (SessionBusy, HistoryMismatch) as error:
                self._notes.saw("meddle", error.reason)
            try:
                async for _ in self._client.generate(held.session_id, params, expected_history_length=held.length):
                    self._notes.hold(False, f"meddle: {held} generates twice at once")
            except (SessionBusy, HistoryMismatch) as error:
                self._notes.saw("meddle", error.reason)
            events += [event async for event in reading]
        self._take_turn(held, params, events)
        await self._check(held, is_after_turn=True)

    async def _cancel(self, held: Held) -> None:
        await self._break_off(held, self._client, "cancel")

    async def _vanish(self, held: Held) -> None:
        """The connection is lost, and with it the call."""
        async with self._new_client() as client:
            await self._break_off(held, client, "vanish")

    async def _break_off(self, held: Held, client: AsyncRuntimeClient, how: str) -> None:
        await self._ready(held)
        stream = client.generate(held.session_id, LONG, expected_history_length=held.length)
        seen: list[Any] = []
        num_wanted = self._rng.randint(1, 6)
        async with aclosing(aiter(stream)) as reading:
            async for event in reading:
                seen.append(event)
                if len(seen) == num_wanted:
                    break
        began = time.perf_counter()
        if client is self._client:
            stream.cancel()
        else:
            await client.close()
        self._notes.saw(how, "cancelled")
        await self._until_idle(held, seen)
        self._notes.cancel_s.append(time.perf_counter() - began)

    async def _until_idle(self, held: Held, seen: list[Any]) -> None:
        """Its history is what was committed: at least what was seen of it."""
        deadline = time.monotonic() + IDLE_WITHIN_S
        info = await self._client.get_session(held.session_id)
        while info.state != "idle" and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
            info = await self._client.get_session(held.session_id)
        num_seen = sum(len(event.token_ids) for event in seen if isinstance(event, Tokens))
        at_most = held.length + (LONG.max_tokens or 0)
        is_so = info.state == "idle" and held.length + num_seen <= info.history_length <= at_most
        self._notes.hold(is_so, f"{held} was broken off after {num_seen} tokens and is {info}")
        held.length = info.history_length
        await self._check(held, is_after_turn=bool(num_seen))

    async def _run_out_of_time(self, held: Held) -> None:
        await self._ready(held)
        timeout_s = self._rng.uniform(0.001, 0.3)
        stream = self._client.generate(held.session_id, LONG, expected_history_length=held.length, timeout_s=timeout_s)
        seen: list[Any] = []
        try:
            async for event in stream:
                seen.append(event)
        except grpc.RpcError as error:
            self._notes.saw("deadline", error.code().name)
            self._notes.hold(error.code() is grpc.StatusCode.DEADLINE_EXCEEDED, f"deadline: {error}")
            if seen:
                await self._until_idle(held, seen)
            else:  # the call may be on its way still
                await self._close(held)
            return
        self._take_turn(held, LONG, seen)
        await self._check(held, is_after_turn=True)

    async def _close_midway(self, held: Held) -> None:
        await self._ready(held)
        stream = self._client.generate(held.session_id, LONG, expected_history_length=held.length)
        async with aclosing(aiter(stream)) as reading:
            events = [await anext(reading)]
            self._forget(held.session_id)
            closing = asyncio.ensure_future(self._client.close_session(held.session_id))
            events += [event async for event in reading]
            await closing
        last = events[-1]
        self._notes.hold(isinstance(last, Done), f"{held} was closed in a turn that ends with {last}")
        self._notes.saw("close midway", last.finish_reason if isinstance(last, Done) else type(last).__name__)
        await self._check_closed(held)

    # --- copies ---

    async def _fork(self, held: Held) -> None:
        if len(self._held) >= MAX_HELD:
            await self._close(held)
            return
        length = self._rng.choice([None, self._rng.randint(0, held.length)])
        options = self._rng.choice([None, replace(held.options, drafter_policy=DrafterPolicy("off"))])
        request_id = new_id()
        info = await self._client.fork_session(held.session_id, options=options, history_length=length, request_id=request_id)
        self._keep(info, options or held.options, held.length if length is None else length)
        if self._rng.random() < 0.5:
            again = await self._client.fork_session(held.session_id, history_length=length, request_id=request_id)
            self._notes.hold(again.session_id == info.session_id, "fork: one request id made two sessions")
        await self._check(held)
        self._notes.saw("fork", "done")

    async def _save_and_restore(self, held: Held) -> None:
        if len(self._held) >= MAX_HELD:
            await self._close(held)
            return
        name = f"{self._name}-{new_id()[:8]}"
        before = await self._check(held)
        await self._client.save_session(held.session_id, name)
        await self._expect("SAVED_EXISTS", self._client.save_session(held.session_id, name))
        request_id = new_id()
        info = await self._client.restore_session(name, request_id=request_id)
        self._keep(info, held.options, held.length)
        self._notes.hold(info.cached_tokens in (0, before.cached_tokens), f"restored from {before} it is {info}")
        again = await self._client.restore_session(name, request_id=request_id)
        self._notes.hold(again.session_id == info.session_id, "restore: one request id made two sessions")
        await self._client.delete_saved_session(name)
        await self._expect("SAVED_NOT_FOUND", self._client.restore_session(name))
        await self._check(held)
        self._notes.saw("save and restore", "done")

    async def _expect(self, reason: str, work: Awaitable[object]) -> None:
        try:
            await work
            self._notes.hold(False, f"{reason} was to be expected, and the call went through")
        except SavedSessionRejected as error:
            self._notes.hold(error.reason == reason, f"{reason} was to be expected, not {error.reason}: {error}")
