"""Stream a completion over gRPC; run `make serve` first.

FORETOKEN_API_KEY: the key of a server that wants one.

.venv/bin/python -m examples.grpc_stream ["def read_json(path):" [127.0.0.1:50051]]
"""

import argparse
import os
import sys

import grpc

from protos import common_pb2, gateway_pb2, gateway_pb2_grpc

parser = argparse.ArgumentParser(prog="examples.grpc_stream", description="Stream a completion over gRPC.")
parser.add_argument("prompt", nargs="?", default="def read_json(path):", help="text to continue (default: %(default)s)")
parser.add_argument(
    "address", nargs="?", default="127.0.0.1:50051", help="host and gRPC port of the server (default: %(default)s)"
)
options = parser.parse_args()
sampling = common_pb2.SamplingParams(temperature=0, max_tokens=128)
request = gateway_pb2.GenerateRequest(text=options.prompt, sampling=sampling)
key = os.environ.get("FORETOKEN_API_KEY", "")
metadata = [("authorization", f"Bearer {key}")] if key else []
with grpc.insecure_channel(options.address) as channel:
    try:
        grpc.channel_ready_future(channel).result(timeout=5)
    except grpc.FutureTimeoutError:
        sys.exit(
            f"no gRPC server answers at {options.address} (REST has a port of its own); start one with: make serve"
        )
    print(options.prompt, end="")
    try:
        for response in gateway_pb2_grpc.GatewayServiceStub(channel).Generate(request, metadata=metadata):
            match response.WhichOneof("event"):
                case "chunk":
                    print(response.chunk.text, end="", flush=True)
                case "complete":
                    stats = response.complete.speculation
                    print(
                        f"\n\n{response.complete.num_output_tokens} tokens in {stats.num_decode_steps} decode steps, "
                        f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} drafted tokens accepted"
                    )
    except grpc.RpcError as error:
        sys.exit(f"{options.address}: {error.details()}")
