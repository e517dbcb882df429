//! Communicators made from one with a fabric before NCCL has made them.

use windlass_engine::contract::Contract;
use windlass_engine::fabric::{self, Asked, Configured, Derivation, Fate, Newborn, Waiting, Wanted};

use crate::births::{nothing_is_left, three_devices};
use crate::support::*;

const CONFIGURED: Configured = Configured { waiting: Some(Waiting::Blocking), ctas_max: None };

fn is_fabric(fate: &Fate) -> &Contract {
    let Fate::Fabric(fabric) = fate else { panic!("{fate:?}") };
    fabric.contract()
}

fn newborn(device: &Primary, derivation: &Derivation) -> Newborn {
    let (rank, ranks) = derivation.survivors();
    Newborn { device: device.device, rank, ranks: ranks.len() as u32 }
}

/// The survivors of a shrink meet before NCCL is asked. What they have is a promise if all of them ask so, and the contract
/// says it to all alike; NCCL's own way is as before.
#[test]
fn shrinks() {
    let Some(devices) = three_devices() else { return };
    let parents = fabric::all_here(&[0, 1, 2]);
    let shrink = |promises: [bool; 2]| {
        let ask = |(rank, promise): (usize, bool)| {
            let Fate::Fabric(parent) = &parents[rank] else { panic!("{:?}", parents[rank]) };
            let derivation = parent.derive(&Wanted::Shrink(vec![1])).unwrap().begun();
            let newborn = newborn(&devices[rank], &derivation);
            let asked = if promise {
                derivation.ask_promise(newborn, CONFIGURED)
            } else {
                derivation.ask(newborn, CONFIGURED)
            };
            asked.unwrap()
        };
        let asked: Vec<Asked> = [0, 2].into_iter().zip(promises).map(ask).collect();
        fabric::join(asked)
    };
    for (promises, is_promise) in [([true, true], true), ([true, false], false), ([false, false], false)] {
        let fates = shrink(promises);
        let contracts: Vec<&Contract> = fates.iter().map(is_fabric).collect();
        assert_eq!(contracts[0], contracts[1]);
        assert_eq!((contracts[0].members.len(), contracts[0].is_promise()), (2, is_promise));
        assert_eq!(contracts[0].members[1].device.uuid, is_fabric(&parents[0]).members[2].device.uuid);
    }
    drop(parents);
    nothing_is_left();
}
