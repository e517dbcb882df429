//! What the ranks of a communicator agreed on at its init: plain data, the same bytes on every rank.
//!
//! Only what is in the negotiated config (and in a call's shared part) may decide a path. The host of the session composes it
//! once from what all ranks reported; every rank reads the very same bytes.

pub mod bytes;
mod token;

use bytes::{Reader, Writer, checksum};

pub use token::Token;

/// A peer group has at most this many ranks: as many GPUs as one host joins by NVLink.
pub const RANKS_MAX: usize = 16;
/// A rank's attachment is at most this many bytes.
pub const ATTACHMENT_BYTES_MAX: usize = 4096;
/// The limits that a rank brings are at most so many bytes.
pub const CELLS_BYTES_MAX: usize = 256;
/// No negotiated config is longer.
pub const NEGOTIATED_BYTES_MAX: usize = 256 + RANKS_MAX * (128 + CELLS_BYTES_MAX + ATTACHMENT_BYTES_MAX);

/// Blocks of a grid at most, on any device: as many as NCCL's collectives have on an H100. Communicators have no common order, as over
/// NCCL, and ranks may launch theirs in opposite ones: the fewer blocks a grid has, the more communicators still meet
/// (`crates/kernels/README.md`). With 32 blocks six communicators of 4 ranks hung on 4 × H100, where NCCL's did not.
pub const GRID_MAX: u32 = 24;

/// What a device of so many multiprocessors may have of them: 24 of an A100's 108, 16 of an H20's 78.
pub const fn grid_of(multiprocessors: u32) -> u32 {
    let whole_clusters = 4 * (multiprocessors / 16);
    let grid = if whole_clusters > 0 { whole_clusters } else { 1 };
    if grid < GRID_MAX { grid } else { GRID_MAX }
}

/// A version of Windlass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Version {
    pub major: u16,
    pub minor: u16,
    pub patch: u16,
}

impl Version {
    /// This build's.
    pub const THIS: Version = Version {
        major: number(env!("CARGO_PKG_VERSION_MAJOR")),
        minor: number(env!("CARGO_PKG_VERSION_MINOR")),
        patch: number(env!("CARGO_PKG_VERSION_PATCH")),
    };

    pub(crate) fn put(self, writer: &mut Writer) {
        writer.u16(self.major).u16(self.minor).u16(self.patch);
    }

    pub(crate) fn take(reader: &mut Reader<'_>) -> Option<Version> {
        Some(Version { major: reader.u16()?, minor: reader.u16()?, patch: reader.u16()? })
    }
}

const fn number(text: &str) -> u16 {
    let (bytes, mut value, mut index) = (text.as_bytes(), 0, 0);
    while index < bytes.len() {
        value = value * 10 + (bytes[index] - b'0') as u16;
        index += 1;
    }
    value
}

/// A GPU, by names that hold in every process and container of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// CUDA's UUID.
    pub uuid: [u8; 16],
    /// PCI domain, bus and device.
    pub pci: (u32, u8, u8),
    /// Compute capability, 90 for 9.0.
    pub capability: u16,
    /// SMs.
    pub multiprocessors: u16,
}

/// A rank, as its peers know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its number.
    pub rank: u32,
    /// Its process, by a random name: process ids of other namespaces say nothing.
    pub process: Token,
    /// Its process id in its own namespace, for logs.
    pub process_id: u32,
    /// Its GPU.
    pub device: Device,
    /// The Unix socket where this rank's process takes descriptors in this init
    /// ([`crate::descriptors`]); ranks that joined together share one.
    pub descriptor_socket: Token,
    /// The secret of the process listener of this rank's process, where the ranks of communicators made from this one meet
    /// ([`crate::children`]); zeros where there is none.
    pub process_listener: Token,
    /// The limits of native collectives that this rank brings, at most [`CELLS_BYTES_MAX`].
    pub cells: Vec<u8>,
    /// Whether this rank would tell the others what it calls.
    pub checks: bool,
    /// What mechanisms announce to their peers, at most [`ATTACHMENT_BYTES_MAX`].
    pub attachment: Vec<u8>,
}

impl Member {
    pub(crate) fn put(&self, writer: &mut Writer) {
        let (domain, bus, slot) = self.device.pci;
        writer.u32(self.rank).token(self.process).u32(self.process_id);
        writer.raw(&self.device.uuid).u32(domain).u8(bus).u8(slot);
        writer.u16(self.device.capability).u16(self.device.multiprocessors);
        writer
            .token(self.descriptor_socket)
            .token(self.process_listener)
            .counted(&self.cells, CELLS_BYTES_MAX)
            .u8(self.checks.into())
            .counted(&self.attachment, ATTACHMENT_BYTES_MAX);
    }

    pub(crate) fn take(reader: &mut Reader<'_>) -> Option<Member> {
        Some(Member {
            rank: reader.u32()?,
            process: reader.token()?,
            process_id: reader.u32()?,
            device: Device {
                uuid: reader.raw()?,
                pci: (reader.u32()?, reader.u8()?, reader.u8()?),
                capability: reader.u16()?,
                multiprocessors: reader.u16()?,
            },
            descriptor_socket: reader.token()?,
            process_listener: reader.token()?,
            cells: reader.counted(CELLS_BYTES_MAX)?.to_vec(),
            checks: match reader.u8()? {
                0 => false,
                1 => true,
                _ => return None,
            },
            attachment: reader.counted(ATTACHMENT_BYTES_MAX)?.to_vec(),
        })
    }
}

/// What all ranks of a peer group agreed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NegotiatedConfig {
    /// Names this communicator; no other has it.
    pub comm: Token,
    /// Every rank's version of Windlass.
    pub version: Version,
    /// The host that all ranks share, by its boot id.
    pub host: Token,
    /// What every rank can do, [`capability`] bits.
    pub capabilities: u64,
    /// Checksum of the options that change behaviour, the same on every rank.
    pub options: u64,
    /// The least of the ranks' limits on blocks; 0 is no limit.
    pub ctas_max: u32,
    /// All ranks, in order.
    pub members: Vec<Member>,
}

/// What a rank's device and driver can do.
pub mod capability {
    /// CUDA's virtual memory calls.
    pub const VIRTUAL_MEMORY: u64 = 1;
    /// Memory that is exported as a file descriptor.
    pub const DESCRIPTORS: u64 = 2;
    // 4 was memory that is exported as a fabric handle.
    /// Multicast objects, of which NCCL may make use (NVLS).
    pub const MULTICAST: u64 = 8;
    /// This rank would have NCCL's communicator built later only: what all ranks would is a lazy communicator. Nobody goes to NCCL with the
    /// id of its init, ever: that id is recycled.
    pub const LAZY: u64 = 16;
    /// This rank would have that of some communicators made from this one: where all would, they tell each other at splits.
    pub const LAZY_CHILDREN: u64 = 32;
    /// This rank keeps NCCL's communicators behind lazy ones that have ended: where all do, they are cached.
    pub const CACHES: u64 = 64;
    /// This rank would register the buffers of some calls with NCCL: where all would, they have a shared page by which they agree on which.
    pub const REGISTERS: u64 = 128;
    /// This rank would have native collectives, and has the kernels for them.
    pub const NATIVE: u64 = 256;
    /// This rank's configuration asks for no policy of blocks.
    pub const UNBOUND: u64 = 512;
    /// This rank would keep windows that are deregistered: where all would, they share words by which they agree on which to use again.
    pub const WINDOWS: u64 = 1024;
    /// This rank would have one kernel run several small collectives of a group.
    pub const BATCHES: u64 = 2048;
    /// Larger ones, too.
    pub const LARGER_BATCHES: u64 = 4096;
    // 8192 was that of all-gathers that stored into peers' windows: earlier builds may still say it.
    /// NCCL's launches of this rank wait for those of no other rank of its process (NCCL_LAUNCH_MODE).
    pub const LAUNCHES_ALONE: u64 = 16384;
    /// With multicast, NCCL of this rank's release runs rings of 2 to 4 ranks, as it does without.
    pub const RINGS_IN_FOURS: u64 = 32768;
    /// This rank would register buffers also where that was not measured.
    pub const REGISTERS_ANYWHERE: u64 = 65536;
    /// This rank would have reductions that round in the order of ranks, at every size: all ranks must say the same.
    pub const FIXED_ORDER: u64 = 131_072;
    /// What every rank of a peer group must have.
    pub const REQUIRED: u64 = VIRTUAL_MEMORY | DESCRIPTORS;
}

/// Of negotiated configs, and of what a rank reports before there is one: the id tag says it, too.
pub const LAYOUT: u16 = 12;

impl NegotiatedConfig {
    /// The bytes that every rank gets.
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.u16(LAYOUT).token(self.comm);
        self.version.put(&mut writer);
        writer.token(self.host).u64(self.capabilities).u64(self.options).u32(self.ctas_max);
        writer.u32(self.members.len() as u32);
        self.members.iter().for_each(|member| member.put(&mut writer));
        writer.finish()
    }

    /// Reads a negotiated config: exactly [`NegotiatedConfig::encode`]'s bytes, with each rank in its place.
    pub fn decode(bytes: &[u8]) -> Option<NegotiatedConfig> {
        let mut reader = Reader::new(bytes);
        if reader.u16()? != LAYOUT {
            return None;
        }
        let mut negotiated = NegotiatedConfig {
            comm: reader.token()?,
            version: Version::take(&mut reader)?,
            host: reader.token()?,
            capabilities: reader.u64()?,
            options: reader.u64()?,
            ctas_max: reader.u32()?,
            members: Vec::new(),
        };
        let ranks = reader.u32()? as usize;
        if ranks > RANKS_MAX {
            return None;
        }
        for rank in 0..ranks {
            let member = Member::take(&mut reader)?;
            if member.rank as usize != rank {
                return None;
            }
            negotiated.members.push(member);
        }
        reader.finish()?;
        Some(negotiated)
    }

    /// The same on every rank; of two inits never the same, short of an accident of 64 bits.
    pub fn hash(&self) -> u64 {
        checksum(&self.encode())
    }

    /// Blocks of a kernel at most, as far as the ranks' configurations say.
    pub fn ctas_max(&self) -> u32 {
        if self.ctas_max == 0 { GRID_MAX } else { self.ctas_max.min(GRID_MAX) }
    }

    /// Blocks of every grid at most. The ranks' grids are equal, whatever else lives or runs on their devices: kernels of which only the
    /// first blocks are resident make progress for that reason alone (`crates/kernels/README.md`).
    pub fn grid_max(&self) -> u32 {
        let multiprocessors = self.members.iter().map(|member| member.device.multiprocessors.into()).min();
        self.ctas_max().min(grid_of(multiprocessors.unwrap_or(u32::MAX)))
    }

    /// Whether every rank's device has clusters of blocks: 9.0 and newer.
    pub fn has_clusters(&self) -> bool {
        self.members.iter().all(|member| member.device.capability >= 90)
    }

    /// Whether NCCL's communicator is built later only.
    pub fn is_lazy(&self) -> bool {
        self.capabilities & capability::LAZY != 0
    }

    /// Whether NCCL's communicator may be cached when this one ends. If not, all ranks end it as ever.
    pub fn caches(&self) -> bool {
        self.capabilities & capability::CACHES != 0
    }

    /// Whether communicators made from this one may be lazy.
    pub fn may_have_lazy_children(&self) -> bool {
        self.capabilities & capability::LAZY_CHILDREN != 0
    }

    /// Whether the buffers of some calls may be registered with NCCL. Never of a lazy communicator: what NCCL builds for it may be built anew,
    /// or cached, and calls come before it is there.
    pub fn registers(&self) -> bool {
        self.capabilities & capability::REGISTERS != 0 && !self.is_lazy()
    }

    /// Whether windows are kept when they are deregistered. A policy of blocks may be the one with which NCCL makes windows of its own.
    pub fn keeps_windows(&self) -> bool {
        let both = capability::WINDOWS | capability::UNBOUND;
        self.capabilities & both == both
    }

    /// Whether ranks tell each other what they call: where all would.
    pub fn checks(&self) -> bool {
        !self.members.is_empty() && self.members.iter().all(|member| member.checks)
    }

    /// The descriptor sockets of the processes that take part, each once, in the order of their first rank.
    pub fn descriptor_sockets(&self) -> Vec<Token> {
        let mut descriptor_sockets: Vec<Token> = Vec::new();
        for member in &self.members {
            if !descriptor_sockets.contains(&member.descriptor_socket) {
                descriptor_sockets.push(member.descriptor_socket);
            }
        }
        descriptor_sockets
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn negotiated(ctas_max: u32, devices: &[(u16, u16)]) -> NegotiatedConfig {
        let token = Token([0; 16]);
        let member = |(rank, (multiprocessors, capability)): (u32, &(u16, u16))| Member {
            rank,
            process: token,
            process_id: 0,
            device: Device {
                uuid: [0; 16],
                pci: (0, 0, 0),
                capability: *capability,
                multiprocessors: *multiprocessors,
            },
            descriptor_socket: token,
            process_listener: token,
            cells: Vec::new(),
            checks: false,
            attachment: Vec::new(),
        };
        let members = (0..).zip(devices).map(member).collect();
        let version = Version::THIS;
        NegotiatedConfig { comm: token, version, host: token, capabilities: 0, options: 0, ctas_max, members }
    }

    /// Grids follow from the least device and the least limit.
    #[test]
    fn grids() {
        assert_eq!([148, 132, 108, 78, 32, 16, 15, 1].map(grid_of), [24, 24, 24, 16, 8, 4, 1, 1]);
        let (h100, a100) = ((132, 90), (108, 80));
        let of = |ctas_max, devices: &[(u16, u16)]| negotiated(ctas_max, devices).grid_max();
        assert_eq!([of(0, &[h100; 2]), of(0, &[h100, a100]), of(12, &[h100; 2])], [24, 24, 12]);
        let h20 = (78, 90);
        assert_eq!([of(0, &[]), of(99, &[h100; 2]), of(30, &[a100, h20])], [24, 24, 16]);
    }

    /// So many communicators of 2, 4 and 8 ranks make progress in any order on H100, by the bound of `crates/kernels/README.md`; NCCL's, of
    /// 24 channels on all 132 multiprocessors, as many.
    #[test]
    fn as_many_communicators_meet_as_over_nccl() {
        let most = |blocks: u32, room: u32, ranks: u32| {
            (1..).take_while(|count| count * blocks * (ranks - 1) < ranks * room).last().unwrap()
        };
        let all = |blocks, room| [2, 4, 8].map(|ranks| most(blocks, room, ranks));
        let in_clusters_of_4 = 128;
        assert_eq!((all(grid_of(132), in_clusters_of_4), all(24, 132)), ([10, 7, 6], [10, 7, 6]));
    }

    /// Clusters are for kernels of which every rank's device has them: an empty block fills one up on all or on none.
    #[test]
    fn clusters() {
        let has = |capabilities: &[u16]| {
            let devices: Vec<_> = capabilities.iter().map(|capability| (132, *capability)).collect();
            negotiated(0, &devices).has_clusters()
        };
        assert_eq!([has(&[90, 100]), has(&[90, 89]), has(&[80])], [true, false, false]);
    }
}
