"""Mooncake's TransferEngine: reads of other nodes' bounce buffers over RDMA, in a process of its own."""
