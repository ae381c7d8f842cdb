"""Stubs generated from proto/runtime/rpc/v1/runtime.proto; `make proto` writes them again, a test compares."""
