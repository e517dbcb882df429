//! The cache of registrations, over a registrar that is strict as NCCL is not: it fails the test where NCCL would hang,
//! corrupt or leak.

mod cases;

mod lookups;

mod properties;

mod strict;
