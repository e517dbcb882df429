//! Communicators made from one with a fabric before NCCL has made them.

use std::thread;

use windlass_engine::contract::Contract;
use windlass_engine::fabric::{
    self, Asked, Configured, Course, Derivation, Fate, Newborn, Others, Patience, Waiting, Wanted,
};

use crate::births::{nothing_is_left, three_devices};

const CONFIGURED: Configured = Configured { waiting: Some(Waiting::Blocking), ctas_max: None };

fn contract(fate: &Fate) -> &Contract {
    let Fate::Fabric(fabric) = fate else { panic!("{fate:?}") };
    fabric.contract()
}

fn begun(parent: &Fate, wanted: Wanted) -> Derivation {
    let Fate::Fabric(fabric) = parent else { panic!("{parent:?}") };
    fabric.derive(&wanted).unwrap().begun()
}

fn ask(derivation: Derivation, newborn: Newborn, patience: Patience) -> Asked {
    let asked = match patience {
        Patience::AsConfigured => derivation.ask_promise(newborn, CONFIGURED),
        Patience::None => derivation.ask(newborn, CONFIGURED),
    };
    asked.unwrap()
}

/// The survivors of a shrink meet before NCCL is asked. What they have is a promise if all of them ask so, and the contract
/// says it to all alike; NCCL's own way is as before.
#[test]
fn shrinks() {
    let Some(devices) = three_devices() else { return };
    let parents = fabric::all_here(&[0, 1, 2], Patience::None);
    let shrink = |patience: [Patience; 2]| {
        let report = |(parent, patience): (usize, Patience)| {
            let derivation = begun(&parents[parent], Wanted::Shrink(vec![1]));
            let (rank, ranks) = derivation.survivors();
            assert_eq!(ranks, [0, 2]);
            let newborn = Newborn { device: devices[parent].device, rank, ranks: 2 };
            ask(derivation, newborn, patience)
        };
        fabric::join([0, 2].into_iter().zip(patience).map(report).collect())
    };
    let (patient, hurried) = (Patience::AsConfigured, Patience::None);
    for (patience, is_promise) in
        [([patient, patient], true), ([patient, hurried], false), ([hurried, hurried], false)]
    {
        let fates = shrink(patience);
        assert_eq!(contract(&fates[0]), contract(&fates[1]));
        assert_eq!(contract(&fates[0]).is_promise(), is_promise);
        assert_eq!(contract(&fates[0]).members[1].device, contract(&parents[0]).members[2].device);
    }
    drop(parents);
    nothing_is_left();
}

/// A split in which two ranks have a promise and the third is in none: nobody needs NCCL, and the ranks of the promise are
/// as their keys say. From that promise another is made in the same way.
#[test]
fn splits() {
    let Some(devices) = three_devices() else { return };
    let parents = fabric::all_here(&[0, 1, 2], Patience::None);
    assert!(parents.iter().all(|parent| contract(parent).may_promise_children()));
    let split = |parent: &Fate, device: usize, color: Option<i32>, key: i32| -> (Course, Option<Fate>) {
        let mut derivation = begun(parent, Wanted::Split(color));
        let course = derivation.round(key, Patience::AsConfigured.willing()).unwrap();
        let Course::Promise { rank, ranks, .. } = &course else {
            derivation.pass_by();
            return (course, None);
        };
        let newborn = Newborn { device: devices[device].device, rank: *rank, ranks: ranks.len() as u32 };
        let asked = ask(derivation, newborn, Patience::AsConfigured);
        (course, fabric::join(vec![asked]).pop())
    };
    let all = |calls: Vec<(&Fate, usize, Option<i32>, i32)>| -> Vec<(Course, Option<Fate>)> {
        thread::scope(|scope| {
            let split = &split;
            let call = |(parent, device, color, key)| scope.spawn(move || split(parent, device, color, key));
            let threads: Vec<_> = calls.into_iter().map(call).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    };
    let pairs =
        all(vec![(&parents[0], 0, Some(4), 9), (&parents[1], 1, None, 0), (&parents[2], 2, Some(4), 1)]);
    let promise =
        |rank, ranks: [u32; 2]| Course::Promise { rank, ranks: ranks.to_vec(), others: Others::Nothing };
    let courses: Vec<&Course> = pairs.iter().map(|(course, _)| course).collect();
    assert_eq!(courses, [&promise(1, [2, 0]), &Course::Nothing, &promise(0, [2, 0])]);
    let fates: Vec<Fate> = pairs.into_iter().filter_map(|(_, fate)| fate).collect();
    assert_eq!(contract(&fates[0]), contract(&fates[1]));
    assert!(contract(&fates[0]).is_promise() && contract(&fates[0]).may_promise_children());
    assert_eq!(contract(&fates[0]).members[0].device, contract(&parents[0]).members[2].device);

    let nested = all(vec![(&fates[0], 0, Some(0), 0), (&fates[1], 2, Some(0), 0)]);
    assert!(nested.iter().all(|(_, fate)| contract(fate.as_ref().unwrap()).is_promise()));
    // Three are no pair, and one alone is none either.
    let three = all((0..3).map(|rank| (&parents[rank], rank, Some(0), 0)).collect());
    assert!(three.iter().all(|(course, _)| *course == Course::Nccl));
    let alone = all((0..3).map(|rank| (&parents[rank], rank, Some(rank as i32 / 2), 0)).collect());
    assert_eq!(alone[2].0, Course::Nccl);
    assert!(matches!(alone[0].0, Course::Promise { rank: 0, others: Others::Nccl, .. }));
    drop((parents, fates, nested, three, alone));
    nothing_is_left();
}
