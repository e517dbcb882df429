//! Contexts: the stack of current contexts of each thread, their life, and the order that the legacy stream imposes within one.

use crate::code::{
    CUDA_ERROR_CONTEXT_IS_DESTROYED, CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_VALUE,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, Code,
};
use crate::device::Ordinal;
use crate::lane::{Lane, Marker};
use crate::simulator::{Simulator, next_identity, simulator};
use crate::sync::lock;
use crate::table::Handle;
use crate::{capture, leak, module, stream};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex, Weak};

pub struct Context {
    pub handle: Handle,
    pub id: u64,
    pub device: Ordinal,
    pub kind: Kind,
    pub legacy: Arc<Lane>,
    pub legacy_id: u64,
    /// Locked after a stream's capture state.
    order: Mutex<Order>,
    pub settings: Mutex<Settings>,
}

#[derive(Clone, Copy, PartialEq)]
pub enum Kind {
    Primary,
    Created,
}

#[derive(Default)]
pub struct Settings {
    pub flags: u32,
    pub cache: u32,
    pub shared_banks: u32,
    pub limits: std::collections::BTreeMap<u32, usize>,
    pub peers: BTreeSet<Ordinal>,
}

/// How a stream is ordered against the legacy default stream.
#[derive(Clone, Copy, PartialEq)]
pub enum Role {
    Legacy,
    Blocking,
    NonBlocking,
}

#[derive(Default)]
struct Order {
    lanes: Vec<(Role, Weak<Lane>)>,
}

/// A device's primary context: its handle stays the same when the context is released and retained again.
#[derive(Default)]
pub struct Primary {
    pub handle: Option<Handle>,
    pub holders: usize,
    pub flags: u32,
}

thread_local! {
    /// Never dropped: exit handlers of an ending thread may still call the driver.
    static CURRENT: ManuallyDrop<RefCell<Vec<Handle>>> = const { ManuallyDrop::new(RefCell::new(Vec::new())) };
}

impl Context {
    pub fn new(handle: Handle, device: Ordinal, kind: Kind, flags: u32) -> Self {
        Context {
            handle,
            id: next_identity(),
            device,
            kind,
            legacy: Arc::default(),
            legacy_id: next_identity(),
            order: Mutex::default(),
            settings: Mutex::new(Settings { flags, ..Settings::default() }),
        }
    }

    pub fn new_lane(&self, role: Role) -> Arc<Lane> {
        let lane = Arc::<Lane>::default();
        let mut order = lock(&self.order);
        order.lanes.retain(|(_, lane)| lane.strong_count() > 0);
        order.lanes.push((role, Arc::downgrade(&lane)));
        lane
    }

    /// Queues an operation. Work of the legacy stream waits for all work that blocking streams have now, and their work for the legacy stream's.
    pub fn submit(&self, lane: &Arc<Lane>, role: Role, operation: impl FnOnce() + Send + 'static) -> Marker {
        let order = lock(&self.order);
        let before: Vec<Marker> = match role {
            Role::Legacy => order.markers(|role| role == Role::Blocking),
            Role::Blocking => self.legacy.marker().into_iter().collect(),
            Role::NonBlocking => Vec::new(),
        };
        lane.submit(move || {
            before.iter().for_each(Marker::wait);
            operation();
        })
    }

    /// Markers after all work of the legacy stream and of blocking streams.
    pub fn markers_for_legacy(&self) -> Vec<Marker> {
        let mut markers = lock(&self.order).markers(|role| role == Role::Blocking);
        markers.extend(self.legacy.marker());
        markers
    }

    pub fn synchronize(&self) {
        let mut markers = lock(&self.order).markers(|_| true);
        markers.extend(self.legacy.marker());
        markers.iter().for_each(Marker::wait);
    }
}

impl Order {
    fn markers(&self, wanted: impl Fn(Role) -> bool) -> Vec<Marker> {
        let lanes = self.lanes.iter().filter(|(role, _)| wanted(*role));
        lanes.filter_map(|(_, lane)| lane.upgrade()?.marker()).collect()
    }
}

/// The context that is current on this thread.
pub fn current() -> Result<Arc<Context>, Code> {
    let simulator = simulator()?;
    let handle = current_handle().ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
    simulator.contexts.get(handle).ok_or(CUDA_ERROR_CONTEXT_IS_DESTROYED)
}

pub fn current_handle() -> Option<Handle> {
    CURRENT.with(|stack| stack.borrow().last().copied())
}

/// Replaces the top of this thread's stack; null removes it.
pub fn set_current(handle: Handle) -> Result<(), Code> {
    if handle != 0 {
        find(handle)?;
    }
    CURRENT.with(|stack| {
        let mut stack = stack.borrow_mut();
        stack.pop();
        stack.extend((handle != 0).then_some(handle));
    });
    Ok(())
}

pub fn push_current(handle: Handle) -> Result<(), Code> {
    find(handle)?;
    CURRENT.with(|stack| stack.borrow_mut().push(handle));
    Ok(())
}

pub fn pop_current() -> Result<Handle, Code> {
    simulator()?;
    CURRENT.with(|stack| stack.borrow_mut().pop()).ok_or(CUDA_ERROR_INVALID_CONTEXT)
}

/// The context of a handle; null means the current one.
pub fn find_or_current(handle: Handle) -> Result<Arc<Context>, Code> {
    if handle == 0 { current() } else { find(handle) }
}

pub fn find(handle: Handle) -> Result<Arc<Context>, Code> {
    simulator()?.contexts.get(handle).ok_or(CUDA_ERROR_INVALID_CONTEXT)
}

pub fn create(device: Ordinal, flags: u32) -> Result<Arc<Context>, Code> {
    let simulator = simulator()?;
    simulator.device(device)?;
    let context = simulator.contexts.insert(|handle| Context::new(handle, device, Kind::Created, flags));
    push_current(context.handle)?;
    Ok(context)
}

pub fn destroy(handle: Handle) -> Result<(), Code> {
    let simulator = simulator()?;
    let context = find(handle)?;
    if context.kind == Kind::Primary {
        return Err(CUDA_ERROR_INVALID_CONTEXT);
    }
    if capture::running_in(context.handle) {
        return Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    tear_down(simulator, &context, Left::Leaks);
    CURRENT.with(|stack| stack.borrow_mut().pop_if(|top| *top == handle));
    Ok(())
}

pub fn retain_primary(ordinal: Ordinal) -> Result<Handle, Code> {
    let simulator = simulator()?;
    let mut primary = lock(&simulator.device(ordinal)?.primary);
    let flags = primary.flags;
    let handle = match primary.handle {
        Some(handle) if primary.holders > 0 => handle,
        Some(handle) => {
            simulator.contexts.restore(handle, Arc::new(Context::new(handle, ordinal, Kind::Primary, flags)));
            handle
        }
        None => {
            simulator.contexts.insert(|handle| Context::new(handle, ordinal, Kind::Primary, flags)).handle
        }
    };
    primary.handle = Some(handle);
    primary.holders += 1;
    Ok(handle)
}

pub fn release_primary(ordinal: Ordinal) -> Result<(), Code> {
    let simulator = simulator()?;
    let mut primary = lock(&simulator.device(ordinal)?.primary);
    if primary.holders == 0 {
        return Err(CUDA_ERROR_INVALID_CONTEXT);
    }
    primary.holders -= 1;
    if primary.holders == 0 {
        end_primary(simulator, &primary, Left::Leaks);
    }
    Ok(())
}

pub fn reset_primary(ordinal: Ordinal) -> Result<(), Code> {
    let simulator = simulator()?;
    let mut primary = lock(&simulator.device(ordinal)?.primary);
    if primary.holders > 0 {
        end_primary(simulator, &primary, Left::Goes);
    }
    primary.holders = 0;
    primary.flags = 0;
    Ok(())
}

pub fn set_primary_flags(ordinal: Ordinal, flags: u32) -> Result<(), Code> {
    if flags & !0xff != 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let simulator = simulator()?;
    let mut primary = lock(&simulator.device(ordinal)?.primary);
    primary.flags = flags;
    let live = primary.handle.and_then(|handle| simulator.contexts.get(handle));
    if let Some(context) = live {
        lock(&context.settings).flags = flags;
    }
    Ok(())
}

/// What becomes of objects that the application has not released when it ends their context.
#[derive(Clone, Copy, PartialEq)]
enum Left {
    Leaks,
    /// They are no leaks: the application has reset the context in order to drop them.
    Goes,
}

fn end_primary(simulator: &Simulator, primary: &Primary, left: Left) {
    let context = primary.handle.and_then(|handle| simulator.contexts.get(handle));
    if let Some(context) = context {
        tear_down(simulator, &context, left);
    }
}

/// Waits for a context's work and ends the context with all its objects, as the driver does. Objects that the application has not
/// released count as leaks with `Left::Leaks`.
fn tear_down(simulator: &Simulator, context: &Context, what_is_left: Left) {
    context.synchronize();
    if what_is_left == Left::Leaks {
        leak::count_abandoned(simulator, context.handle);
    }
    for stream in simulator.streams.all().iter().filter(|stream| stream.context.handle == context.handle) {
        simulator.streams.remove(stream.handle);
        // This fails only if the capture's graph is gone already; then nothing is left to end.
        let _ = stream::retire(stream);
    }
    for event in simulator.events.all().iter().filter(|event| event.context == context.handle) {
        simulator.events.remove(event.handle);
    }
    for module in simulator.modules.all().iter().filter(|module| module.context == context.handle) {
        // This fails only if another thread has unloaded the module meanwhile.
        let _ = module::unload(module.handle);
    }
    let ranges = lock(&simulator.ranges).take_of_context(context.handle);
    drop(ranges);
    context.legacy.close();
    simulator.contexts.remove(context.handle);
}

/// Waits for all work on a device, in all contexts.
pub fn synchronize_device(simulator: &Simulator, device: Ordinal) {
    for context in simulator.contexts.all().iter().filter(|context| context.device == device) {
        context.synchronize();
    }
}
