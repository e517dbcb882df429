//! The id tag: what Windlass writes into the bytes of an `ncclUniqueId` that NCCL leaves unused.
//!
//! | bytes | NCCL (2.18 … 2.32) | with an id tag |
//! |---|---|---|
//! | 0–7 | magic, random per id | the same |
//! | 8–35 | socket address of the root: `sockaddr_in` or `sockaddr_in6` | the same, our port |
//! | 36–39 | padding; the number of ranks from 2.29.2 | the same |
//! | 40–127 | unused, and not even zeroed up to 2.22 | the id tag, zeros behind it |
//!
//! Every rank hands all 128 bytes to NCCL, which hashes them. So they must be equal on all ranks, and never change once
//! the application has them. An id tag counts only if its checksum fits *these* bytes 0–39: neither garbage nor an id
//! tag copied into another id does.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

use nccl_sys::NCCL_UNIQUE_ID_BYTES;

use crate::negotiated::bytes::{Reader, Writer, checksum};
use crate::negotiated::{self, Token, Version};

/// The bytes of an `ncclUniqueId`.
pub type Id = [u8; NCCL_UNIQUE_ID_BYTES];

/// What the id tag says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdTag {
    /// The version of Windlass that made the id.
    pub version: Version,
    /// Proves that a connection comes from someone who was given this id.
    pub token: Token,
    /// Where NCCL's own root listens, on the same interface.
    pub root_port: u16,
}

const MAGIC: [u8; 8] = *b"windlass";
/// The version of the layout. It changes with the id tag and with any message between ranks.
pub(super) const LAYOUT: u16 = 2 + (negotiated::LAYOUT << 8);
const ID_TAG: usize = 40;
const FAMILY: std::ops::Range<usize> = 8..10;
const PORT: std::ops::Range<usize> = 10..12;
const ID_TAG_BYTES: usize = 8 + 2 + 6 + 16 + 2 + 8;

impl IdTag {
    /// Reads the id tag of an id. None if the id is NCCL's own or another implementation's, or its tag is of another
    /// layout or damaged.
    pub fn decode(id: &Id) -> Option<IdTag> {
        let mut reader = Reader::new(&id[ID_TAG..ID_TAG + ID_TAG_BYTES]);
        if reader.raw::<8>()? != MAGIC || reader.u16()? != LAYOUT {
            return None;
        }
        let id_tag =
            IdTag { version: Version::take(&mut reader)?, token: reader.token()?, root_port: reader.u16()? };
        let sum = reader.u64()?;
        (sum == checksum(&id[..ID_TAG + ID_TAG_BYTES - 8]) && id_tag.root_port != 0).then_some(id_tag)
    }

    /// The id with this id tag, and with our port in its address. None if the id holds no address that others can
    /// reach.
    pub fn encode(&self, id: &Id, our_port: u16) -> Option<Id> {
        let mut tagged = with_port(id, our_port)?;
        let mut writer = Writer::default();
        writer.raw(&MAGIC).u16(LAYOUT);
        self.version.put(&mut writer);
        writer.token(self.token).u16(self.root_port);
        let id_tag = writer.finish();
        let end = ID_TAG + id_tag.len();
        tagged[ID_TAG..end].copy_from_slice(&id_tag);
        let sum = checksum(&tagged[..end]);
        tagged[end..end + 8].copy_from_slice(&sum.to_le_bytes());
        tagged[end + 8..].fill(0);
        Some(tagged)
    }
}

/// The socket address in the id. None if there is none.
pub fn address(id: &Id) -> Option<SocketAddr> {
    let family = u16::from_ne_bytes([id[FAMILY.start], id[FAMILY.start + 1]]);
    let port = u16::from_be_bytes([id[PORT.start], id[PORT.start + 1]]);
    match i32::from(family) {
        libc::AF_INET => {
            let octets: [u8; 4] = id[12..16].try_into().ok()?;
            Some(SocketAddrV4::new(Ipv4Addr::from(octets), port).into())
        }
        libc::AF_INET6 => {
            let octets: [u8; 16] = id[16..32].try_into().ok()?;
            let scope = u32::from_ne_bytes(id[32..36].try_into().ok()?);
            Some(SocketAddrV6::new(Ipv6Addr::from(octets), port, 0, scope).into())
        }
        _ => None,
    }
}

/// The first bytes of NCCL's connections for this id, in all releases from 2.18 to 2.30: the 64 random bits at the
/// front of the id (`sendToRoot` in its `bootstrap.cc`). `NCCL_SOCKET_MAGIC` concerns other sockets of NCCL.
pub(super) fn magic(id: &Id) -> [u8; 8] {
    std::array::from_fn(|index| id[index])
}

fn with_port(id: &Id, port: u16) -> Option<Id> {
    let usable = address(id)?;
    let anywhere = matches!(usable.ip(), IpAddr::V4(ip) if ip.is_unspecified())
        || matches!(usable.ip(), IpAddr::V6(ip) if ip.is_unspecified());
    if anywhere {
        return None;
    }
    let mut changed = *id;
    changed[PORT].copy_from_slice(&port.to_be_bytes());
    Some(changed)
}

/// For tests in other crates.
#[cfg(any(test, feature = "test-support"))]
pub mod test_support {
    use super::*;

    /// For fuzzing: the same id with the right checksum of an id tag.
    pub fn with_right_sum(mut id: Id) -> Id {
        let end = ID_TAG + ID_TAG_BYTES - 8;
        let sum = checksum(&id[..end]);
        id[end..end + 8].copy_from_slice(&sum.to_le_bytes());
        id
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// An id as NCCL makes it. `rest`: the bytes behind the address, which NCCL need not zero.
    fn nccl_id(magic: u64, ip: IpAddr, port: u16, rest: &[u8]) -> Id {
        let mut id = [0; 128];
        id[..8].copy_from_slice(&magic.to_ne_bytes());
        id[10..12].copy_from_slice(&port.to_be_bytes());
        match ip {
            IpAddr::V4(ip) => {
                id[8..10].copy_from_slice(&2u16.to_ne_bytes());
                id[12..16].copy_from_slice(&ip.octets());
            }
            IpAddr::V6(ip) => {
                id[8..10].copy_from_slice(&10u16.to_ne_bytes());
                id[16..32].copy_from_slice(&ip.octets());
                id[32..36].copy_from_slice(&3u32.to_ne_bytes());
            }
        }
        id[40..].copy_from_slice(rest);
        id
    }

    fn ids() -> impl Strategy<Value = Id> {
        let ip = prop_oneof![
            any::<u32>().prop_map(|bits| IpAddr::V4(Ipv4Addr::from(bits | 1))),
            any::<u128>().prop_map(|bits| IpAddr::V6(Ipv6Addr::from(bits | 1))),
        ];
        (any::<u64>(), ip, 1..u16::MAX, proptest::collection::vec(any::<u8>(), 88))
            .prop_map(|(magic, ip, port, rest)| nccl_id(magic, ip, port, &rest))
    }

    fn id_tags() -> impl Strategy<Value = IdTag> {
        (any::<[u16; 3]>(), any::<[u8; 16]>(), 1..u16::MAX).prop_map(
            |([major, minor, patch], token, root_port)| IdTag {
                version: Version { major, minor, patch },
                token: Token(token),
                root_port,
            },
        )
    }

    proptest! {
        /// What was written is read; magic, interface and bytes 36–39 stay NCCL's; our port is in the address.
        #[test]
        fn round_trip(id in ids(), id_tag in id_tags(), port in 1..u16::MAX) {
            let tagged = id_tag.encode(&id, port).unwrap();
            prop_assert_eq!(IdTag::decode(&tagged), Some(id_tag));
            prop_assert_eq!(&tagged[..10], &id[..10]);
            prop_assert_eq!(&tagged[12..40], &id[12..40]);
            let (before, after) = (address(&id).unwrap(), address(&tagged).unwrap());
            prop_assert_eq!((before.ip(), port), (after.ip(), after.port()));
        }

        /// An id of NCCL's has no id tag, whatever its unused bytes are.
        #[test]
        fn no_id_tag(id in ids()) {
            prop_assert_eq!(IdTag::decode(&id), None);
        }

        /// An id tag with one bit changed, or carried over into another id, is none.
        #[test]
        fn damaged(id in ids(), other in ids(), id_tag in id_tags(), bit in 0usize..(ID_TAG + ID_TAG_BYTES) * 8) {
            let tagged = id_tag.encode(&id, 5).unwrap();
            let mut damaged = tagged;
            damaged[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(IdTag::decode(&damaged), None);
            let mut moved = other;
            moved[40..].copy_from_slice(&tagged[40..]);
            prop_assert_eq!(IdTag::decode(&moved), None);
        }
    }

    /// Ids without an address that others can reach get no id tag.
    #[test]
    fn no_address() {
        let id_tag = IdTag { version: Version::THIS, token: Token([7; 16]), root_port: 9 };
        assert_eq!(id_tag.encode(&[0; 128], 5), None);
        let anywhere = nccl_id(1, IpAddr::V4(Ipv4Addr::UNSPECIFIED), 5, &[0; 88]);
        assert_eq!(id_tag.encode(&anywhere, 5), None);
        assert_eq!(IdTag::decode(&[0; 128]), None);
        assert_eq!(IdTag::decode(&[0xff; 128]), None);
    }

    /// The bytes of an id tag, pinned: ranks of one version read each other.
    #[test]
    fn pinned() {
        let id = nccl_id(0x0102_0304_0506_0708, "10.1.2.3".parse().unwrap(), 4000, &[0xaa; 88]);
        let version = Version { major: 1, minor: 2, patch: 3 };
        let id_tag = IdTag { version, token: Token([9; 16]), root_port: 4000 };
        let tagged = id_tag.encode(&id, 5000).unwrap();
        assert_eq!(&tagged[8..16], &[2, 0, 0x13, 0x88, 10, 1, 2, 3]);
        assert_eq!(&tagged[40..49], b"windlass\x02");
        assert_eq!(u16::from(tagged[49]), negotiated::LAYOUT);
        assert_eq!(&tagged[50..58], b"\x01\x00\x02\x00\x03\x00\x09\x09");
        assert_eq!(&tagged[72..74], &4000u16.to_le_bytes());
        assert!(tagged[82..].iter().all(|byte| *byte == 0));
    }
}
