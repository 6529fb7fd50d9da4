"""The FastAPI application: endpoints, authorization and limits."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from .._C import version as __version__
from ..engine import AsyncEngine, AsyncRequest, Engine
from ..engine.text.detokenizer import Detokenizer
from .grammars import GrammarCompiler, GrammarLimits
from .metrics import Metrics
from .observer import STATUS_LEFT, Observer
from .parsers import FirstCall, OneCall, Parser, ReasoningByTokens, ThinkTokens, format_of
from .protocol import (
    ConversationBody,
    DetokenizeBody,
    Object,
    ParsedRequest,
    PromptBody,
    RequestError,
    Settings,
    check_model,
    parse_body,
    read_chat,
    read_completion,
    read_conversation,
    read_prompts,
    unexpected,
    validate,
    without_folders,
)
from .responses import Answer, ResponseBuilder, event
from .responses_api import ResponsesApi
from .text import configuration_of, token_texts

PAGE = Path(__file__).with_name("page.html")
PAGE_POLICY = (
    "default-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"  # no external content
)

CLIENT_LEFT = "the client has left"
LARGE_BODY = 1 << 16  # bytes; larger ones are parsed in a thread

T = TypeVar("T")
Reader = Callable[[Object, Settings, Engine], ParsedRequest]
Endpoint = Callable[[Request], Awaitable[Response]]


class Server:
    """The endpoints of one engine, in one event loop."""

    def __init__(self, tasks: AsyncEngine, settings: Settings) -> None:
        engine = tasks.engine
        detokenizer = engine.core.inputs.detokenizer
        if detokenizer is None or not detokenizer.is_fast:
            lack = engine.core.inputs.no_tokenizer or "it is not one of `tokenizers`"
            raise ValueError(f"serve: the model has no tokenizer that gives text piece by piece, expected one ({lack})")
        self.tasks, self.engine, self.settings = tasks, engine, settings
        self.metrics = Metrics(engine, settings.model_name)
        self.started = int(time.time())
        self._detokenizer = detokenizer
        self._token_text = token_texts(detokenizer)
        template = settings.chat_template or getattr(engine.tokenizer, "chat_template", None) or ""
        self._format = format_of(str(template), settings.tool_parser, settings.reasoning_parser)
        vocabulary = engine.tokenizer.get_vocab()
        self._tags = {tag: vocabulary[tag] for tag in self._format.tags(has_tools=True) if tag in vocabulary}
        self._markups: dict[bool, Detokenizer] = {}
        self.grammars = GrammarCompiler(engine, GrammarLimits(seconds=settings.max_grammar_seconds))
        self._large_bodies = asyncio.Semaphore(1)  # parsed at a time: each needs the GIL for a while
        self._num_prepared = 0  # texts of requests that are tokenized, or whose grammars are compiled
        self._preparing: set[asyncio.Task[Any]] = set()  # requests that are read, tokenized or compiled
        self._is_ending = False  # `cancel_all` was called

    # --- generation

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, read_chat, is_chat=True)

    async def complete(self, request: Request) -> Response:
        return await self._generate(request, read_completion, is_chat=False)

    async def _generate(self, request: Request, read: Reader, *, is_chat: bool) -> Response:
        arrival = time.perf_counter()
        # In a thread: the texts of a prediction or of stop strings are tokenized.
        parsed = await asyncio.to_thread(read, await self.body(request), self.settings, self.engine)
        builder = await self.start(request, parsed, arrival, is_chat=is_chat)
        return await self.answer(request, builder, parsed.stream)

    async def start(self, request: Request, parsed: ParsedRequest, arrival: float, *, is_chat: bool) -> ResponseBuilder:
        """Submit a request to the engine, and return the builder of its response."""
        with self._reserved(parsed.num_prompts * parsed.params.n):  # before a million prompts are tokenized
            token_lists = await self._unless_gone(request, self._prepare(parsed))
            parsed.check_prompts(token_lists)
            think = self._think_tokens(parsed, token_lists[0]) if is_chat else None
            ready = parsed if think is None else after_reasoning(parsed, think)
            requests = self._submit(ready, token_lists, arrival, client_of(request))
        request.scope["facts"] |= {"requests": requests, "model": self.settings.model_name}
        return ResponseBuilder(
            parsed,
            requests,
            is_chat=is_chat,
            model=self.settings.model_name,
            detokenizer=self._detokenizer,
            token_text=self._token_text,
            parser=self._parsers(parsed, token_lists[0], think) if is_chat else None,
            markup=self._markup(bool(parsed.tools)) if is_chat and not parsed.params.constraint[0] else None,
            on_first=lambda: self.metrics.first_token.observe(time.perf_counter() - arrival),
        )

    async def answer(self, request: Request, answer: Answer, stream: bool) -> Response:
        """Return the HTTP response of an answer, whole or a stream."""
        if stream:
            return EventStream(answer)
        async with cancelled_on_disconnect(request.receive, answer.requests) as client:
            try:
                return JSONResponse(await answer.whole())
            except RequestError as error:
                client.expect_there(error)
                raise

    def _markup(self, has_tools: bool) -> Detokenizer | None:
        """Return what decodes texts with the special tokens that their parser reads; None: it reads none."""
        if has_tools not in self._markups:
            self._markups[has_tools] = Detokenizer(self.engine.tokenizer, self._format.tags(has_tools))
        markup = self._markups[has_tools]
        return markup if markup.shows_special_tokens else None

    def _think_tokens(self, parsed: ParsedRequest, prompt: list[int]) -> ThinkTokens | None:
        """Return what marks the reasoning before a constrained answer; None: there is no constraint or no reasoning."""
        constrained, _ = parsed.params.constraint
        if not constrained or not parsed.separate_reasoning:
            return None
        end, text_bytes = self._prompt_end(prompt), self._detokenizer.text_bytes
        return self._format.think_tokens(self._tags, lambda one: text_bytes(one).decode(), end, parsed.continued)

    def _prompt_end(self, prompt: list[int]) -> str:
        return self._detokenizer.decode(prompt[-32:], skip_special_tokens=False)

    def _parsers(
        self, parsed: ParsedRequest, prompt: list[int], think: ThinkTokens | None
    ) -> Callable[[], Parser] | None:
        """Return what creates the parser of each answer to a conversation; None: answers are text."""
        tools = parsed.tools
        if think is not None:

            def new_parser_by_tokens() -> Parser:
                answer = OneCall(tools) if parsed.must_call else self._format.answer_parser(tools)
                return ReasoningByTokens(answer if parsed.parallel_calls else FirstCall(answer), think)

            return new_parser_by_tokens
        if parsed.must_call:
            return lambda: OneCall(tools)
        constrained, _ = parsed.params.constraint  # no tag can be in the text
        separate = parsed.separate_reasoning and not constrained and self._format.reasoning is not None
        if not tools and not separate:
            return None
        end = "" if constrained else self._prompt_end(prompt)

        def new_parser() -> Parser:
            parser = self._format.parser(tools, end, separate_reasoning=separate)
            return parser if parsed.parallel_calls else FirstCall(parser)

        return new_parser

    @property
    def _room(self) -> int:
        """Return how many requests may run and wait."""
        return self.engine.config.num_slots + self.settings.max_queued

    @contextmanager
    def _reserved(self, count: int) -> Iterator[None]:
        """Count texts as waiting while they are prepared; RequestError if there is no room for them."""
        if count > self._room:
            raise RequestError(f"prompt and n ask for {count} texts, expected at most {self._room}", "n")
        num_open = self.metrics.num_open + self._num_prepared
        if num_open + count > self._room:
            message = f"{num_open} requests are waiting or running, expected fewer: try again later"
            raise RequestError(message, status=429, code="queue_full", headers={"Retry-After": "1"})
        self._num_prepared += count
        try:
            yield
        finally:
            self._num_prepared -= count

    async def _prepare(self, parsed: ParsedRequest) -> list[list[int]]:
        """Return the tokens of a request's prompts, once its grammar is compiled."""
        token_lists = await asyncio.to_thread(parsed.tokenize, self.engine)
        try:
            await self.grammars.compile(parsed.params)
        except ValueError as error:
            raise parsed.refused(error) from error
        return token_lists

    async def _unless_gone(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        """Await work, and cancel it when the client disconnects or the server ends."""
        watcher = asyncio.ensure_future(disconnected(request.receive))
        try:
            return await self._until_end(work, watcher)
        finally:
            watcher.cancel()

    async def _until_end(self, work: Coroutine[Any, Any, T], watcher: asyncio.Future[None] | None = None) -> T:
        """Await work, and cancel it when `cancel_all` is called, or when the watcher has seen the client disconnect."""
        cancelled = RequestError("the request was cancelled, expected to be sent again", status=503)
        if self._is_ending:
            work.close()
            raise cancelled
        task = asyncio.ensure_future(work)
        self._preparing.add(task)
        try:
            awaited: list[asyncio.Future[Any]] = [task] if watcher is None else [task, watcher]
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientDisconnect
            if task.cancelled():
                raise cancelled
            return task.result()
        finally:
            self._preparing.discard(task)
            task.cancel()

    def _submit(
        self, parsed: ParsedRequest, token_lists: list[list[int]], arrival: float, client: int
    ) -> list[AsyncRequest]:
        """Submit every choice of every prompt, or none."""
        most = self.settings.max_prompt_tokens
        begun = len(parsed.params.generated_token_ids)
        for tokens in token_lists:
            if most is not None and (count := len(tokens) + begun) > most:
                whole = "the prompt with generated_token_ids" if begun else "the prompt"
                raise RequestError(f"{whole} has {count} tokens, expected at most {most}", "prompt")
        params = [replace(parsed.params, client=client)] * len(token_lists)
        try:
            with unavailable_as_503():
                requests = self.tasks.submit_tokens(token_lists, params)
        except ValueError as error:
            raise parsed.refused(error) from error
        self.metrics.begin(requests, arrival)
        return requests

    def prepare(self) -> None:
        """Start the process that compiles grammars before the first one comes; call it in the event loop."""
        if self.engine.config.grammars:
            self.grammars.start()

    def cancel_all(self) -> None:
        """Cancel all running and waiting requests, and those that come later; clients get an error."""
        self._is_ending = True
        for task in self._preparing:
            task.cancel()
        for request in self.metrics.open_requests:
            request.cancel()

    # --- other endpoints

    async def tokenize(self, request: Request) -> Response:
        tokens = await asyncio.to_thread(self._tokenize, await self.body(request))
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": self.engine.config.max_len})

    def _tokenize(self, body: Object) -> list[int]:
        if body.get("messages") is not None:
            return read_conversation(validate(ConversationBody, body, self.settings), self.settings).tokenize(
                self.engine
            )[0]
        prompts = read_prompts(validate(PromptBody, body, self.settings))
        if len(prompts.prompts) > 1:
            raise unexpected("prompt", body["prompt"], "one prompt")
        return prompts.tokenize(self.engine)[0]

    async def detokenize(self, request: Request) -> Response:
        return JSONResponse({"prompt": await asyncio.to_thread(self._detokenize, await self.body(request))})

    def _detokenize(self, body: Object) -> str:
        tokens = validate(DetokenizeBody, body, self.settings).tokens
        vocab_size, max_len = self.engine.target.config.vocab_size, self.engine.config.max_len
        if len(tokens) > max_len:
            raise RequestError(f"tokens has {len(tokens)} entries, expected at most {max_len} (max_len)", "tokens")
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise RequestError(f"tokens has {token}, expected 0 to {vocab_size - 1}", "tokens")
        text: str = self.engine.tokenizer.decode(tokens)
        return text

    async def tokenizer_info(self, request: Request) -> Response:
        """Return the tokenizer's configuration in vLLM's form."""
        self.check_key(request)
        return JSONResponse(configuration_of(self.engine.tokenizer, self.settings.chat_template))

    async def models(self, request: Request) -> Response:
        self.check_key(request)
        names = self.settings.model_name, *self.settings.other_names
        return JSONResponse({"object": "list", "data": [self._model(name) for name in names]})

    async def model(self, request: Request) -> Response:
        self.check_key(request)
        check_model(request.path_params["model"], self.settings)
        return JSONResponse(self._model(request.path_params["model"]))

    def _model(self, name: str) -> Object:
        return {
            "id": name,
            "object": "model",
            "created": self.started,
            "owned_by": "specdec_kernels",
            "max_model_len": self.engine.config.max_len,
        }

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def server_info(self, request: Request) -> Response:
        """Return the fields that SGLang's benchmark and its router read."""
        self.check_key(request)
        config = self.engine.config
        return JSONResponse(
            {
                "model_path": self.settings.model_name,
                "served_model_name": self.settings.model_name,
                "version": __version__,
                "max_running_requests": config.num_slots,
                "max_total_tokens": config.num_pages * config.page_size,
                "internal_states": [{"avg_spec_accept_length": self.metrics.totals.accept_length}],
            }
        )

    async def model_info(self, request: Request) -> Response:
        """Return the fields of SGLang that say what is served."""
        self.check_key(request)
        name, model_type = self.settings.model_name, self.engine.target.config.model_type
        return JSONResponse(
            {"model_path": name, "served_model_name": name, "is_generation": True, "model_type": model_type}
        )

    async def load(self, request: Request) -> Response:
        """Return how much the engine has to do, in the form by which SGLang's router compares replicas."""
        self.check_key(request)
        outputs = [one.output for one in self.metrics.open_requests]
        return JSONResponse(
            [
                {
                    "dp_rank": 0,
                    "num_reqs": len(outputs),
                    "num_waiting_reqs": self.engine.core.scheduler.num_waiting,
                    "num_tokens": sum(len(output.prompt_tokens) + len(output.tokens) for output in outputs),
                }
            ]
        )

    def expect_healthy(self) -> None:
        """Raise RequestError, of status 503, if the engine cannot run, or if a grammar does not end."""
        with unavailable_as_503():
            self.engine.core.expect_open()
        if trouble := self.grammars.trouble:
            raise RequestError(trouble, status=503)

    async def health(self, _: Request) -> Response:
        self.expect_healthy()
        return JSONResponse({"status": "ok"})

    async def flush_cache(self, request: Request) -> Response:
        self.check_key(request)
        with unavailable_as_503():
            await asyncio.to_thread(self.engine.clear_cache)
        return JSONResponse({"status": "ok"})

    async def show_metrics(self, _: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def page(self, _: Request) -> Response:
        return HTMLResponse(PAGE.read_bytes(), headers={"Content-Security-Policy": PAGE_POLICY})

    # --- authorization and limits

    def check_key(self, request: Request) -> None:
        key = self.settings.api_key
        if key is None:
            return
        given = request.headers.get("authorization", "").encode()
        if not secrets.compare_digest(given, f"Bearer {key}".encode()):
            message = "the API key is missing or another one, expected that of this server (Authorization: Bearer ...)"
            headers = {"WWW-Authenticate": "Bearer"}
            raise RequestError(message, status=401, code="invalid_api_key", headers=headers)

    async def body(self, request: Request) -> Object:
        self.check_key(request)
        seconds = self.settings.upload_seconds
        try:
            whole = await asyncio.wait_for(self._until_end(self._read(request)), seconds)
        except asyncio.TimeoutError as error:
            message = f"the body has not come within {seconds:g} s, expected a faster upload"
            raise RequestError(message, status=408, headers={"Connection": "close"}) from error
        if len(whole) <= LARGE_BODY:
            return parse_body(whole)
        async with self._large_bodies:
            return await asyncio.to_thread(parse_body, whole)

    async def _read(self, request: Request) -> bytes:
        """Return the bytes of a body."""
        most = self.settings.max_body_bytes
        length = request.headers.get("content-length", "")
        parts: list[bytes] = []
        size = int(length) if length.isdecimal() else 0
        if size <= most:
            size = 0
            async for part in request.stream():
                size += len(part)
                if size > most:
                    break
                parts.append(part)
        if size > most:
            raise RequestError(f"the body has {size} bytes or more, expected at most {most}", status=413)
        return b"".join(parts)


def client_of(request: Request) -> int:
    """Return the number of a client, by its address."""
    return 1 + zlib.crc32(request.client.host.encode()) % (2**31 - 1) if request.client else 0


def after_reasoning(parsed: ParsedRequest, think: ThinkTokens) -> ParsedRequest:
    """Return a request whose constraint begins after its reasoning."""
    params = parsed.params
    bias = {**(params.logit_bias or {}), **dict.fromkeys(think.never, -math.inf)}
    opening = None if think.inside else think.begin
    later = replace(params, constrain_after=[think.end], constrain_unless=opening, logit_bias=bias or None)
    return replace(parsed, params=later)


@contextmanager
def unavailable_as_503() -> Iterator[None]:
    """Convert a RuntimeError of the engine, which is closed or asleep, to status 503."""
    try:
        yield
    except RuntimeError as error:
        raise RequestError(str(error), status=503) from error


class EventStream(Response):
    """A stream of a response's events. A failure before the first event has its own status code."""

    def __init__(self, answer: Answer) -> None:
        self.background = None
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = self._answer.events()
        async with (
            cancelled_on_disconnect(receive, self._answer.requests) as client,
            aclosing(events),  # type: ignore[type-var]
        ):
            try:
                first = await anext(events)
            except RequestError as error:
                client.expect_there(error)
                scope["facts"]["reason"] = str(error)
                return await as_response(error)(scope, receive, send)
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            try:
                async for one in events:
                    await send({"type": "http.response.body", "body": one, "more_body": True})
            except RequestError as error:
                scope["facts"]["reason"] = CLIENT_LEFT if client.has_left else str(error)
                await send({"type": "http.response.body", "body": event(error.body), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def disconnected(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Client:
    """The client of a response.

    Attributes:
        has_left: it has disconnected before the response ended.
    """

    def __init__(self) -> None:
        self.has_left = False

    def expect_there(self, error: RequestError) -> None:
        """Raise ClientDisconnect if the client has left, which is why its requests ended with the error."""
        if self.has_left:
            raise ClientDisconnect from error


@asynccontextmanager
async def cancelled_on_disconnect(receive: Receive, requests: Sequence[AsyncRequest]) -> AsyncIterator[Client]:
    """Cancel the requests when the client disconnects, or when the response ends first."""
    client = Client()

    async def watch() -> None:
        await disconnected(receive)
        client.has_left = True
        for request in requests:
            request.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield client
    finally:
        watcher.cancel()
        for request in requests:
            request.cancel()


def as_response(error: RequestError) -> Response:
    return JSONResponse(error.body, error.status, headers=error.headers)


def make_app(tasks: AsyncEngine, settings: Settings) -> FastAPI:
    """Make the application of an engine. It does not close the engine.

    Raises:
        ValueError: the engine has no fast tokenizer.
    """
    server = Server(tasks, settings)
    responses = ResponsesApi(server)
    app = FastAPI(title="specdec_kernels", docs_url=None, redoc_url=None, openapi_url=None)
    paths: dict[str, tuple[str, Endpoint]] = {
        "/": ("GET", server.page),
        "/v1/chat/completions": ("POST", server.chat),
        "/v1/completions": ("POST", server.complete),
        "/v1/responses": ("POST", responses.create),
        "/v1/responses/{response_id}/cancel": ("POST", responses.cancel),
        "/v1/responses/{response_id}/input_items": ("GET", responses.input_items),
        "/v1/models": ("GET", server.models),
        "/v1/models/{model:path}": ("GET", server.model),  # ids of the hub have a slash
        "/version": ("GET", server.version),
        "/tokenize": ("POST", server.tokenize),
        "/detokenize": ("POST", server.detokenize),
        "/health": ("GET", server.health),
        "/flush_cache": ("POST", server.flush_cache),
        "/metrics": ("GET", server.show_metrics),
        "/server_info": ("GET", server.server_info),
        "/get_server_info": ("GET", server.server_info),
        "/model_info": ("GET", server.model_info),
        "/get_model_info": ("GET", server.model_info),
        "/get_load": ("GET", server.load),
    }
    if settings.shows_tokenizer:
        paths["/tokenizer_info"] = "GET", server.tokenizer_info
    for path, (method, endpoint) in paths.items():
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
    for method, endpoint in (("GET", responses.retrieve), ("DELETE", responses.delete)):
        app.add_api_route("/v1/responses/{response_id}", endpoint, methods=[method], response_model=None)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        request.scope["facts"]["reason"] = str(error)
        return as_response(error)

    async def gone(request: Request, _: Exception) -> Response:
        request.scope["facts"]["reason"] = CLIENT_LEFT
        return Response(status_code=STATUS_LEFT)  # nobody reads it

    async def no_such_path(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        return as_response(RequestError(message, status=error.status_code))

    async def failed(request: Request, error: Exception) -> Response:
        response = as_response(RequestError(f"{type(error).__name__}: {without_folders(str(error))}", status=500))
        response.headers["x-request-id"] = request.scope["request_id"]  # this handler is outside the middleware
        return response

    app.add_exception_handler(RequestError, refused)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(HTTPException, no_such_path)
    app.add_exception_handler(Exception, failed)
    app.add_middleware(Observer, metrics=server.metrics)
    if settings.allowed_origins:
        exposed = ["x-request-id", "retry-after"]
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=exposed,
        )
    app.state.server = server
    return app
