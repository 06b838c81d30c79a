//! What the kernel's routing tables say, read and followed by rtnetlink.
