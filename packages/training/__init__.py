"""The drafter trainer. Rows in, drafter versions out; imports runtime, never serving."""
