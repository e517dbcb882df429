//! How Windlass arranges launches, with a C interface: `host/arrange.h` declares it for the C++ tests of the kernels on the host.
//!
//! The tests choose what the product decides by size: the way of a collective, and its grid. All else that a launch holds comes from
//! the code that the product runs. A request that this code refuses is a fault of the test, and ends the program.

// What the fields mean is said in the header.
#![allow(missing_docs)]

use windlass_kernels::arrange::{self, BulkSend, Call, Direction, Limits, Peer};
use windlass_kernels::collective::{CollectiveLaunch, RANKS_MAX};
use windlass_kernels::collectives::{
    Collective, Family, Geometry, Kind, Layout, Part, Reducer, Reduction, Scalar, Uneven, arrange_by,
    arrange_uneven_by, reducer_of,
};
use windlass_kernels::launch::{self, Launch, Operation};

/// Blocks of a group that is refused, and the reducer of a reduction without kernels.
pub const REFUSED: u32 = u32::MAX;

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct P2pCall {
    pub address: u64,
    pub bytes: u64,
    pub peer: u32,
    pub receive: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct P2pLimits {
    pub bulk_copies: u32,
    pub stages: u32,
    pub shared_bytes_max: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct P2pShape {
    pub blocks: u32,
    pub threads: u32,
    pub shared_bytes: u32,
    pub cluster: u32,
    pub parameter_bytes: u32,
    pub lists_operations: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CollectiveFamily {
    pub packet_bytes: u64,
    pub roles: u32,
    pub service_warps: u32,
    pub shared_bytes: u32,
    pub reserved: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CollectiveReduction {
    pub scalar: u64,
    pub datatype: u32,
    pub operation: u32,
    pub scalar_at: u32,
    pub reserved: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CollectiveRequest {
    pub reduction: CollectiveReduction,
    pub count: u64,
    pub send: u64,
    pub receive: u64,
    pub kind: u32,
    pub element_bytes: u32,
    pub root: u32,
    pub reserved: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct UnevenRequest {
    pub reduction: CollectiveReduction,
    pub parts: [Part; RANKS_MAX],
    pub own: u64,
    pub reduces: u32,
    pub reserved: u32,
}

// As in the header. `tests/kernels/structures.rs` compares the fields.
const _: () = {
    assert!(size_of::<P2pCall>() == 24 && size_of::<Peer>() == 192);
    assert!(size_of::<P2pLimits>() == 12 && size_of::<P2pShape>() == 24);
    assert!(size_of::<Geometry>() == 32 && size_of::<Layout>() == 72);
    assert!(size_of::<CollectiveFamily>() == 24 && size_of::<CollectiveReduction>() == 24);
    assert!(size_of::<CollectiveRequest>() == 64);
    assert!(size_of::<Part>() == 16 && size_of::<UnevenRequest>() == 168);
};

/// By the numbers of `WindlassFamily` in the header.
const FAMILIES: [Family; 11] = [
    Family::Ll,
    Family::Ll128x2,
    Family::Ll128x4,
    Family::AllReduce,
    Family::Simple,
    Family::SimpleAllReduce,
    Family::OneShotX2,
    Family::OneShotX4,
    Family::AllReduceX4,
    Family::OneShotPartsX2,
    Family::OneShotPartsX4,
];

/// By the numbers of `WindlassReducer` in the header.
const REDUCERS: [Reducer; 6] =
    [Reducer::Copy, Reducer::SumF32, Reducer::SumF16, Reducer::SumBf16, Reducer::Any, Reducer::Ordered];

fn family(number: u32) -> Family {
    FAMILIES[number as usize]
}

/// # Safety
/// `at` points to `count` items, which nobody writes meanwhile.
unsafe fn slice<'a, T>(at: *const T, count: usize) -> &'a [T] {
    // An empty vector of C++ has no address.
    if count == 0 {
        return &[];
    }
    // SAFETY: as the caller says.
    unsafe { std::slice::from_raw_parts(at, count) }
}

/// Fills the launch, all but control, report, operation_list and flags. `operations` has room for as many as there are calls.
///
/// # Safety
/// `calls`, `peers` and `operations` point to as many items as said, which nobody else uses meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn windlass_arrange_p2p(
    calls: *const P2pCall,
    call_count: usize,
    peers: *const Peer,
    peer_count: usize,
    geometry: &launch::Geometry,
    limits: &P2pLimits,
    launch: &mut Launch,
    operations: *mut Operation,
) -> P2pShape {
    // SAFETY: as the caller says.
    let (calls, peers) = unsafe { (slice(calls, call_count), slice(peers, peer_count)) };
    let calls: Vec<Call> = calls
        .iter()
        .map(|call| Call {
            address: call.address,
            bytes: call.bytes,
            peer: call.peer,
            direction: if call.receive != 0 { Direction::Receive } else { Direction::Send },
        })
        .collect();
    let stages = limits.stages as u16;
    let bulk = if limits.bulk_copies != 0 { BulkSend::Copies { stages } } else { BulkSend::OrdinaryStores };
    let limits = Limits { bulk, shared_bytes_max: limits.shared_bytes_max };
    let mut made = Vec::new();
    let Ok(shape) = arrange::arrange(&calls, peers, geometry, &limits, launch, &mut made) else {
        return P2pShape { blocks: REFUSED, ..P2pShape::default() };
    };
    assert!(made.len() <= calls.len(), "{} operations of {} calls", made.len(), calls.len());
    if !made.is_empty() {
        // SAFETY: the caller gives room for as many as there are calls.
        unsafe { std::ptr::copy_nonoverlapping(made.as_ptr(), operations, made.len()) };
    }
    P2pShape {
        blocks: shape.blocks,
        threads: shape.threads,
        shared_bytes: shape.shared_bytes,
        cluster: shape.cluster,
        parameter_bytes: shape.parameter_bytes,
        lists_operations: shape.lists_operations.into(),
    }
}

/// Where the wires lie in every rank's region.
#[unsafe(no_mangle)]
pub extern "C" fn windlass_layout(geometry: &Geometry) -> Layout {
    Layout::of(geometry)
}

/// What all kernels of a family have in common.
#[unsafe(no_mangle)]
pub extern "C" fn windlass_family(number: u32) -> CollectiveFamily {
    let family = family(number);
    CollectiveFamily {
        packet_bytes: family.packet_bytes(),
        roles: family.roles(),
        service_warps: family.warps(0),
        shared_bytes: family.shared_bytes(),
        reserved: 0,
    }
}

/// Which reducer serves a type and an operation; [`REFUSED`] if none does.
#[unsafe(no_mangle)]
pub extern "C" fn windlass_reducer(datatype: u32, operation: u32) -> u32 {
    let reduction = Reduction { datatype: datatype as i32, operation: operation as i32 };
    let reducer = reducer_of(reduction);
    let number = REDUCERS.iter().position(|one| Some(*one) == reducer);
    number.map_or(REFUSED, |number| number as u32)
}

/// Fills the launch, all but control, report and the fields of the grid.
///
/// # Safety
/// `regions` points to an address for each rank, which nobody writes meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn windlass_arrange_collective(
    request: &CollectiveRequest,
    family_number: u32,
    geometry: &Geometry,
    regions: *const u64,
    launch: &mut CollectiveLaunch,
) {
    let root = request.root;
    let kinds = [
        Kind::AllReduce,
        Kind::Broadcast { root },
        Kind::Reduce { root },
        Kind::AllGather,
        Kind::ReduceScatter,
    ];
    let kind = kinds[request.kind as usize];
    let reduces = matches!(kind, Kind::AllReduce | Kind::Reduce { .. } | Kind::ReduceScatter);
    let collective = Collective {
        kind,
        count: request.count,
        element_bytes: request.element_bytes,
        reduction: reduces.then(|| request.reduction.in_rust()),
        scalar: request.reduction.scalar().filter(|_| reduces),
        send: request.send,
        receive: request.receive,
    };
    // SAFETY: as the caller says.
    let regions = unsafe { slice(regions, geometry.ranks as usize) };
    arrange_by(&collective, family(family_number), geometry, regions, launch)
        .unwrap_or_else(|refused| panic!("{collective:?}: {refused}"));
}

/// As [`windlass_arrange_collective`], for an all-gather-v or a reduce-scatter-v.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn windlass_arrange_uneven(
    request: &UnevenRequest,
    family_number: u32,
    geometry: &Geometry,
    regions: *const u64,
    launch: &mut CollectiveLaunch,
) {
    let reduces = request.reduces != 0;
    let uneven = Uneven {
        reduction: reduces.then(|| request.reduction.in_rust()),
        scalar: request.reduction.scalar().filter(|_| reduces),
        parts: request.parts,
        own: request.own,
    };
    // SAFETY: as the caller says.
    let regions = unsafe { slice(regions, geometry.ranks as usize) };
    arrange_uneven_by(&uneven, family(family_number), geometry, regions, launch)
        .unwrap_or_else(|refused| panic!("{uneven:?}: {refused}"));
}

/// Whether this rank may run a launch by the straight kernel of its family.
#[unsafe(no_mangle)]
pub extern "C" fn windlass_is_straight(launch: &CollectiveLaunch, family_number: u32) -> bool {
    launch.is_straight(family(family_number))
}

impl CollectiveReduction {
    fn in_rust(&self) -> Reduction {
        Reduction { datatype: self.datatype as i32, operation: self.operation as i32 }
    }

    fn scalar(&self) -> Option<Scalar> {
        let scalar = if self.scalar_at != 0 { Scalar::At(self.scalar) } else { Scalar::Bits(self.scalar) };
        (self.in_rust().operation == windlass_kernels::collectives::SCALED_SUM).then_some(scalar)
    }
}
