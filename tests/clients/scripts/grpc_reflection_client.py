"""grpcio with reflection: services, message types and a stream, without foretoken's protos."""

import grpc
import server
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

GATEWAY = "foretoken.gateway.v1.GatewayService"
PROMPT = "def add(first, second):\n"
NUM_TOKENS = 40

expected = server.post(
    "/v1/completions", {"model": server.MODEL, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
)
with grpc.insecure_channel(server.GRPC_ADDRESS) as channel:
    database = ProtoReflectionDescriptorDatabase(channel)
    services = set(database.get_services())
    assert services == {GATEWAY, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}, services
    pool = DescriptorPool(database)
    assert {name for name in services if pool.FindServiceByName(name).full_name == name} == services
    method = pool.FindServiceByName(GATEWAY).methods_by_name["Generate"]
    assert method.server_streaming and not method.client_streaming
    Request, Response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    generate = channel.unary_stream(
        f"/{GATEWAY}/{method.name}",
        request_serializer=Request.SerializeToString,
        response_deserializer=Response.FromString,
    )

    greedy = {"max_tokens": NUM_TOKENS, "temperature": 0}
    *parts, last = generate(Request(model=server.MODEL, text=PROMPT, sampling=greedy), timeout=600)
    chunks = [part.chunk for part in parts]
    assert "".join(chunk.text for chunk in chunks) == expected["choices"][0]["text"] != ""
    token_ids = [token for chunk in chunks for token in chunk.token_ids]
    assert len(token_ids) == last.complete.num_output_tokens == expected["usage"]["completion_tokens"]
    assert last.complete.num_prompt_tokens == expected["usage"]["prompt_tokens"]

    try:
        list(generate(Request(model="no-such-model", text=PROMPT), timeout=600))
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.NOT_FOUND, error
    else:
        raise AssertionError("an unknown model was served")
