"""Stream a completion over gRPC; run `make serve` first.

python -m examples.grpc_stream ["def read_json(path):" [127.0.0.1:50051]]
"""

import sys

import grpc

from protos import common_pb2, gateway_pb2, gateway_pb2_grpc

prompt = sys.argv[1] if len(sys.argv) > 1 else "def read_json(path):"
request = gateway_pb2.GenerateRequest(text=prompt, sampling=common_pb2.SamplingParams(temperature=0, max_tokens=128))
address = sys.argv[2] if len(sys.argv) > 2 else "127.0.0.1:50051"
with grpc.insecure_channel(address) as channel:
    try:
        grpc.channel_ready_future(channel).result(timeout=5)
    except grpc.FutureTimeoutError:
        sys.exit(f"nothing answers at {address}; start a server with: make serve")
    print(prompt, end="")
    for response in gateway_pb2_grpc.GatewayServiceStub(channel).Generate(request):
        match response.WhichOneof("event"):
            case "chunk":
                print(response.chunk.text, end="", flush=True)
            case "complete":
                stats = response.complete.speculation
                print(
                    f"\n\n{response.complete.num_output_tokens} tokens in {stats.num_decode_steps} decode steps, "
                    f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} drafted tokens accepted"
                )
