//! Tests of the cache of registrations, over a strict registrar: it fails the test where NCCL would hang, corrupt or leak.

mod cases;

mod lookups;

mod properties;

mod strict;
