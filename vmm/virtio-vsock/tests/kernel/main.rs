//! Devices whose queues are the kernel's.

mod vhost_vsock;
