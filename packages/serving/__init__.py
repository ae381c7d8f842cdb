"""The serving program: `python -m serving`. OpenAI over HTTP and sessions over gRPC, on one engine that speculates."""
