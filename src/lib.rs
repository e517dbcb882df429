//! The ABI face of Windlass: exported C functions, nothing else.
