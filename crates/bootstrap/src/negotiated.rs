//! The negotiated config: what the ranks of a communicator agreed on at its init, the same bytes on every rank.
//!
//! Only the negotiated config and the shared part of a call may decide a path. The host of the session makes it once
//! from all ranks' reports.

pub mod bytes;
mod token;

use bytes::{Reader, Writer, checksum};

pub use token::Token;

/// A peer group has at most this many ranks: as many GPUs as one host joins by NVLink.
pub const RANKS_MAX: usize = 16;
/// Bytes of the longest attachment of a rank.
pub const ATTACHMENT_BYTES_MAX: usize = 4096;
/// Bytes of the longest list of limits that a rank brings.
pub const CELLS_BYTES_MAX: usize = 1024;
/// Bytes of the longest negotiated config.
pub const NEGOTIATED_BYTES_MAX: usize = 256 + RANKS_MAX * (128 + CELLS_BYTES_MAX + ATTACHMENT_BYTES_MAX);

/// The most blocks of a grid on any device: as many as NCCL's collectives have on an H100. Communicators have no common
/// order, as in NCCL, and ranks may launch theirs in opposite orders: the fewer blocks a grid has, the more
/// communicators still make progress (`crates/kernels/README.md`). With 32 blocks six communicators of 4 ranks hung on
/// 4 × H100, where NCCL's did not.
pub const GRID_MAX: u32 = 24;

/// The most blocks of a grid on a device with so many multiprocessors: 24 of an A100's 108, 16 of an H20's 78.
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
    /// The version of this build.
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
    /// Streaming multiprocessors.
    pub multiprocessors: u16,
}

/// A rank, as its peers know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// The rank in the communicator.
    pub rank: u32,
    /// A random name of its process: process ids of other namespaces say nothing.
    pub process: Token,
    /// Its process id in its own namespace, for logs.
    pub process_id: u32,
    /// Its GPU.
    pub device: Device,
    /// The Unix socket where this rank's process receives descriptors in this init ([`crate::descriptors`]). Ranks that
    /// joined together share one.
    pub descriptor_socket: Token,
    /// The secret of the process listener of this rank's process, where the ranks of communicators made from this one meet
    /// ([`crate::children`]); zeros where there is none.
    pub process_listener: Token,
    /// The limits of native collectives that this rank brings, at most [`CELLS_BYTES_MAX`].
    pub cells: Vec<u8>,
    /// What other parts of Windlass announce to the peers, at most [`ATTACHMENT_BYTES_MAX`] bytes.
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
            attachment: reader.counted(ATTACHMENT_BYTES_MAX)?.to_vec(),
        })
    }
}

/// What all ranks of a peer group agreed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NegotiatedConfig {
    /// The name of this communicator, which no other one has.
    pub comm: Token,
    /// Every rank's version of Windlass.
    pub version: Version,
    /// The host that all ranks share, by its boot id or names.
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
    /// Memory can be exported as a file descriptor.
    pub const DESCRIPTORS: u64 = 2;
    // Bit 4 meant memory that is exported as a fabric handle.
    /// Multicast objects, of which NCCL may make use (NVLS).
    pub const MULTICAST: u64 = 8;
    /// This rank wants NCCL's communicator built only later. If all ranks want it, the communicator is lazy, and no
    /// rank ever goes to NCCL with the id of its init: that id is recycled.
    pub const LAZY: u64 = 16;
    /// This rank wants some child communicators lazy. If all ranks want it, they tell each other at splits and shrinks.
    pub const LAZY_CHILDREN: u64 = 32;
    /// This rank keeps NCCL's communicators of lazy ones that have ended. If all ranks do, they are cached.
    pub const CACHES: u64 = 64;
    /// This rank wants to register the buffers of some calls with NCCL. If all ranks want it, they agree in a shared
    /// page on which.
    pub const REGISTERS: u64 = 128;
    /// This rank wants native collectives and has the kernels for them.
    pub const NATIVE: u64 = 256;
    /// This rank's configuration sets no policy of blocks.
    pub const UNBOUND: u64 = 512;
    /// This rank wants to keep windows that are deregistered. If all ranks want it, they agree in shared words on which
    /// to use again.
    pub const WINDOWS: u64 = 1024;
    /// This rank has no limit on blocks, so one kernel may also run several larger collectives of a group.
    pub const LARGER_BATCHES: u64 = 4096;
    // Bit 8192 meant all-gathers that store into peers' windows. Earlier builds may still set it.
    /// NCCL's launches of this rank never wait for those of another rank of its process (NCCL_LAUNCH_MODE).
    pub const LAUNCHES_ALONE: u64 = 16384;
    /// This rank's release of NCCL runs rings of 2 to 4 ranks with multicast, as it does without.
    pub const RINGS_IN_FOURS: u64 = 32768;
    /// This rank wants to register buffers also where the gain was not measured.
    pub const REGISTERS_ANYWHERE: u64 = 65536;
    /// This rank wants reductions that round in the order of ranks, at every size. All ranks must want the same.
    pub const FIXED_ORDER: u64 = 131_072;
    /// This rank's kernel gives pidfds, and its sandbox lets it have them. If all have them, ranks see each other's ends; else none does.
    pub const PIDFDS: u64 = 262_144;
    /// The capabilities that every rank of a peer group must have.
    pub const REQUIRED: u64 = VIRTUAL_MEMORY | DESCRIPTORS;
    /// What needs calls of NCCL's that wait.
    pub const OF_BLOCKING: u64 = LAZY_CHILDREN | REGISTERS | WINDOWS;
}

/// The version of the layout of negotiated configs and of reports. The id tag contains it, too.
pub const LAYOUT: u16 = 15;

impl NegotiatedConfig {
    /// The bytes that every rank receives.
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.u16(LAYOUT).token(self.comm);
        self.version.put(&mut writer);
        writer.token(self.host).u64(self.capabilities).u64(self.options).u32(self.ctas_max);
        writer.u32(self.members.len() as u32);
        self.members.iter().for_each(|member| member.put(&mut writer));
        writer.finish()
    }

    /// Reads [`NegotiatedConfig::encode`]'s bytes. None unless they are exactly one negotiated config with its ranks in
    /// order.
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

    /// A hash that is the same on every rank, and differs between two inits but for an accident of 64 bits.
    pub fn hash(&self) -> u64 {
        checksum(&self.encode())
    }

    /// The most blocks of a kernel by the ranks' configurations.
    pub fn ctas_max(&self) -> u32 {
        if self.ctas_max == 0 { GRID_MAX } else { self.ctas_max.min(GRID_MAX) }
    }

    /// The most blocks of every grid. The ranks' grids are equal, whatever else runs on their devices. Kernels of which
    /// only the first blocks are resident make progress only because of that (`crates/kernels/README.md`).
    pub fn grid_max(&self) -> u32 {
        let multiprocessors = self.members.iter().map(|member| member.device.multiprocessors.into()).min();
        self.ctas_max().min(grid_of(multiprocessors.unwrap_or(u32::MAX)))
    }

    /// Whether every rank's device has clusters of blocks: 9.0 and newer.
    pub fn has_clusters(&self) -> bool {
        self.members.iter().all(|member| member.device.capability >= 90)
    }

    /// Whether the communicator is lazy: NCCL builds its part only later.
    pub fn is_lazy(&self) -> bool {
        self.capabilities & capability::LAZY != 0
    }

    /// Whether two ranks are in one process.
    pub fn are_in_one_process(&self, rank: u32, other: u32) -> bool {
        let process = |rank: u32| self.members.get(rank as usize).map(|member| member.process);
        process(rank) == process(other)
    }

    /// Whether ranks see the ends of each other's processes. If not, nobody counts as dead: nothing else proves an end.
    pub fn sees_ends(&self) -> bool {
        self.capabilities & capability::PIDFDS != 0
    }

    /// Whether NCCL's communicator may be cached when this one ends. If not, all ranks destroy it.
    pub fn caches(&self) -> bool {
        self.capabilities & capability::CACHES != 0
    }

    /// Whether communicators made from this one may be lazy.
    pub fn may_have_lazy_children(&self) -> bool {
        self.capabilities & capability::LAZY_CHILDREN != 0
    }

    /// Whether the buffers of some calls may be registered with NCCL. Never for a lazy communicator: NCCL's part may be
    /// built anew or cached, and calls come before it exists.
    pub fn registers(&self) -> bool {
        self.capabilities & capability::REGISTERS != 0 && !self.is_lazy()
    }

    /// Whether deregistered windows are kept. Not if a rank sets a policy of blocks: with that policy NCCL may make
    /// windows of its own.
    pub fn keeps_windows(&self) -> bool {
        let both = capability::WINDOWS | capability::UNBOUND;
        self.capabilities & both == both
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
            attachment: Vec::new(),
        };
        let members = (0..).zip(devices).map(member).collect();
        let version = Version::THIS;
        NegotiatedConfig { comm: token, version, host: token, capabilities: 0, options: 0, ctas_max, members }
    }

    /// Grids follow from the smallest device and the smallest limit.
    #[test]
    fn grids() {
        assert_eq!([148, 132, 108, 78, 32, 16, 15, 1].map(grid_of), [24, 24, 24, 16, 8, 4, 1, 1]);
        let (h100, a100) = ((132, 90), (108, 80));
        let of = |ctas_max, devices: &[(u16, u16)]| negotiated(ctas_max, devices).grid_max();
        assert_eq!([of(0, &[h100; 2]), of(0, &[h100, a100]), of(12, &[h100; 2])], [24, 24, 12]);
        let h20 = (78, 90);
        assert_eq!([of(0, &[]), of(99, &[h100; 2]), of(30, &[a100, h20])], [24, 24, 16]);
    }

    /// By the bound of `crates/kernels/README.md`, so many communicators of 2, 4 and 8 ranks make progress in any order
    /// on H100. NCCL's, of 24 channels on all 132 multiprocessors, are as many.
    #[test]
    fn as_many_communicators_meet_as_over_nccl() {
        let most = |blocks: u32, room: u32, ranks: u32| {
            (1..).take_while(|count| count * blocks * (ranks - 1) < ranks * room).last().unwrap()
        };
        let all = |blocks, room| [2, 4, 8].map(|ranks| most(blocks, room, ranks));
        let in_clusters_of_4 = 128;
        assert_eq!((all(grid_of(132), in_clusters_of_4), all(24, 132)), ([10, 7, 6], [10, 7, 6]));
    }

    /// Clusters need every rank's device to have them: an empty block fills a cluster up on all ranks or on none.
    #[test]
    fn clusters() {
        let has = |capabilities: &[u16]| {
            let devices: Vec<_> = capabilities.iter().map(|capability| (132, *capability)).collect();
            negotiated(0, &devices).has_clusters()
        };
        assert_eq!([has(&[90, 100]), has(&[90, 89]), has(&[80])], [true, false, false]);
    }
}
