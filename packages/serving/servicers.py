"""`RuntimeService` over gRPC. What each call does is in `session_calls`; here it gets its key, and errors become statuses."""

from __future__ import annotations

from runtime.rpc import generation_codec
from runtime.rpc.v1 import runtime_pb2 as pb
from runtime.rpc.v1 import runtime_pb2_grpc
from runtime.types import Done
from serving.grpc_server import Context, Gate, GrpcServer, statuses
from serving.session_calls import SessionCalls

SERVICE = pb.DESCRIPTOR.services_by_name["RuntimeService"]


class RuntimeServicer(runtime_pb2_grpc.RuntimeServiceServicer):
    def __init__(self, calls: SessionCalls, gate: Gate) -> None:
        self._calls = calls
        self._gate = gate

    def register_at(self, server: GrpcServer) -> None:
        server.register(SERVICE, runtime_pb2_grpc.add_RuntimeServiceServicer_to_server, self)

    async def CreateSession(self, request: pb.CreateSessionRequest, context: Context) -> pb.Session:
        async with statuses(context, request):
            return await self._calls.create(request, self._gate.key_of(context))

    async def AppendTokens(self, request: pb.AppendTokensRequest, context: Context) -> pb.AppendTokensResponse:
        async with statuses(context, request):
            return await self._calls.append(request, self._gate.key_of(context))

    async def CloseSession(self, request: pb.CloseSessionRequest, context: Context) -> pb.CloseSessionResponse:
        async with statuses(context, request):
            return await self._calls.close(request, self._gate.key_of(context))

    async def GetSession(self, request: pb.GetSessionRequest, context: Context) -> pb.Session:
        async with statuses(context, request):
            return await self._calls.get(request, self._gate.key_of(context))

    async def ListSessions(self, request: pb.ListSessionsRequest, context: Context) -> pb.ListSessionsResponse:
        async with statuses(context, request):
            return await self._calls.list(request, self._gate.key_of(context))

    async def ForkSession(self, request: pb.ForkSessionRequest, context: Context) -> pb.Session:
        async with statuses(context, request):
            return await self._calls.fork(request, self._gate.key_of(context))

    async def SaveSession(self, request: pb.SaveSessionRequest, context: Context) -> pb.SavedSession:
        async with statuses(context, request):
            return await self._calls.save(request, self._gate.key_of(context))

    async def RestoreSession(self, request: pb.RestoreSessionRequest, context: Context) -> pb.Session:
        async with statuses(context, request):
            return await self._calls.restore(request, self._gate.key_of(context))

    async def ListSavedSessions(self, request: pb.ListSavedSessionsRequest, context: Context) -> pb.ListSavedSessionsResponse:
        async with statuses(context, request):
            return await self._calls.list_saved(request, self._gate.key_of(context))

    async def DeleteSavedSession(self, request: pb.DeleteSavedSessionRequest, context: Context) -> pb.DeleteSavedSessionResponse:
        async with statuses(context, request):
            return await self._calls.delete_saved(request, self._gate.key_of(context))

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        async with statuses(context, request):
            stream = await self._calls.generate(request, self._gate.key_of(context))
            try:
                while not isinstance(event := await stream.next(), Done):
                    await context.write(generation_codec.event_message(event))
                await context.write(generation_codec.event_message(event))
            finally:
                stream.cancel()
