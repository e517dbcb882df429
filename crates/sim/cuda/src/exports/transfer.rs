//! Exports for copies and fills.

use crate::capture;
use crate::code::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, Code};
use crate::context;
use crate::ffi::In;
use crate::memory::{self, Address};
use crate::stream;
use crate::table::Handle;
use crate::virtual_memory;
use crate::work::{Copy, Fill, Work};

/// `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Copy2D {
    source_x: usize,
    source_y: usize,
    source_type: u32,
    source_host: Address,
    source_device: Address,
    source_array: usize,
    source_pitch: usize,
    destination_x: usize,
    destination_y: usize,
    destination_type: u32,
    destination_host: Address,
    destination_device: Address,
    destination_array: usize,
    destination_pitch: usize,
    width: usize,
    height: usize,
}

/// `CUDA_MEMCPY3D`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Copy3D {
    source_x: usize,
    source_y: usize,
    source_z: usize,
    source_level: usize,
    source_type: u32,
    source_host: Address,
    source_device: Address,
    source_array: usize,
    reserved_0: usize,
    source_pitch: usize,
    source_height: usize,
    destination_x: usize,
    destination_y: usize,
    destination_z: usize,
    destination_level: usize,
    destination_type: u32,
    destination_host: Address,
    destination_device: Address,
    destination_array: usize,
    reserved_1: usize,
    destination_pitch: usize,
    destination_height: usize,
    width: usize,
    height: usize,
    depth: usize,
}

exports! {
    fn cuMemcpy / cuMemcpy_ptds(destination: Address, source: Address, bytes: usize) {
        copy_now(destination, source, bytes)
    }

    fn cuMemcpyHtoD_v2 / cuMemcpyHtoD_v2_ptds(destination: Address, source: Address, bytes: usize) {
        memory::check(destination, bytes)?;
        copy_now(destination, source, bytes)
    }

    fn cuMemcpyDtoH_v2 / cuMemcpyDtoH_v2_ptds(destination: Address, source: Address, bytes: usize) {
        memory::check(source, bytes)?;
        copy_now(destination, source, bytes)
    }

    fn cuMemcpyDtoD_v2 / cuMemcpyDtoD_v2_ptds(destination: Address, source: Address, bytes: usize) {
        memory::check(destination, bytes)?;
        memory::check(source, bytes)?;
        // The host does not wait for copies between device addresses.
        capture::refuse_unsafe()?;
        copy_in_order(destination, source, bytes, 0)
    }

    fn cuMemcpyPeer / cuMemcpyPeer_ptds(
        destination: Address,
        destination_context: Handle,
        source: Address,
        source_context: Handle,
        bytes: usize,
    ) {
        check_peers(destination, destination_context, source, source_context, bytes)?;
        capture::refuse_unsafe()?;
        copy_in_order(destination, source, bytes, 0)
    }

    fn cuMemcpyAsync / cuMemcpyAsync_ptsz(destination: Address, source: Address, bytes: usize, stream: Handle) {
        copy_in_order(destination, source, bytes, stream)
    }

    fn cuMemcpyHtoDAsync_v2 / cuMemcpyHtoDAsync_v2_ptsz(
        destination: Address,
        source: Address,
        bytes: usize,
        stream: Handle,
    ) {
        memory::check(destination, bytes)?;
        copy_in_order(destination, source, bytes, stream)
    }

    fn cuMemcpyDtoHAsync_v2 / cuMemcpyDtoHAsync_v2_ptsz(
        destination: Address,
        source: Address,
        bytes: usize,
        stream: Handle,
    ) {
        memory::check(source, bytes)?;
        virtual_memory::check_read(source)?;
        copy_in_order(destination, source, bytes, stream)
    }

    fn cuMemcpyDtoDAsync_v2 / cuMemcpyDtoDAsync_v2_ptsz(
        destination: Address,
        source: Address,
        bytes: usize,
        stream: Handle,
    ) {
        memory::check(destination, bytes)?;
        memory::check(source, bytes)?;
        copy_in_order(destination, source, bytes, stream)
    }

    fn cuMemcpyPeerAsync / cuMemcpyPeerAsync_ptsz(
        destination: Address,
        destination_context: Handle,
        source: Address,
        source_context: Handle,
        bytes: usize,
        stream: Handle,
    ) {
        check_peers(destination, destination_context, source, source_context, bytes)?;
        copy_in_order(destination, source, bytes, stream)
    }

    fn cuMemcpy2D_v2 / cuMemcpy2D_v2_ptds(copy: In<Copy2D>) {
        boxed_now(copy.get()?.plan()?)
    }

    fn cuMemcpy2DUnaligned_v2 / cuMemcpy2DUnaligned_v2_ptds(copy: In<Copy2D>) {
        boxed_now(copy.get()?.plan()?)
    }

    fn cuMemcpy2DAsync_v2 / cuMemcpy2DAsync_v2_ptsz(copy: In<Copy2D>, stream: Handle) {
        stream::issue(&stream::find(stream)?, Work::Copy(copy.get()?.plan()?)).map(drop)
    }

    fn cuMemcpy3D_v2 / cuMemcpy3D_v2_ptds(copy: In<Copy3D>) {
        boxed_now(copy.get()?.plan()?)
    }

    fn cuMemcpy3DAsync_v2 / cuMemcpy3DAsync_v2_ptsz(copy: In<Copy3D>, stream: Handle) {
        stream::issue(&stream::find(stream)?, Work::Copy(copy.get()?.plan()?)).map(drop)
    }

    fn cuMemsetD8_v2 / cuMemsetD8_v2_ptds(destination: Address, value: u8, count: usize) {
        fill_now(&fill(destination, u32::from(value), 1, count)?)
    }

    fn cuMemsetD16_v2 / cuMemsetD16_v2_ptds(destination: Address, value: u16, count: usize) {
        fill_now(&fill(destination, u32::from(value), 2, count)?)
    }

    fn cuMemsetD32_v2 / cuMemsetD32_v2_ptds(destination: Address, value: u32, count: usize) {
        fill_now(&fill(destination, value, 4, count)?)
    }

    fn cuMemsetD8Async / cuMemsetD8Async_ptsz(destination: Address, value: u8, count: usize, stream: Handle) {
        fill_in_order(&fill(destination, u32::from(value), 1, count)?, stream)
    }

    fn cuMemsetD16Async / cuMemsetD16Async_ptsz(destination: Address, value: u16, count: usize, stream: Handle) {
        fill_in_order(&fill(destination, u32::from(value), 2, count)?, stream)
    }

    fn cuMemsetD32Async / cuMemsetD32Async_ptsz(destination: Address, value: u32, count: usize, stream: Handle) {
        fill_in_order(&fill(destination, value, 4, count)?, stream)
    }

    fn cuMemsetD2D8_v2 / cuMemsetD2D8_v2_ptds(at: Address, pitch: usize, value: u8, width: usize, height: usize) {
        fill_now(&fill_rows(at, pitch, u32::from(value), 1, width, height)?)
    }

    fn cuMemsetD2D16_v2 / cuMemsetD2D16_v2_ptds(at: Address, pitch: usize, value: u16, width: usize, height: usize) {
        fill_now(&fill_rows(at, pitch, u32::from(value), 2, width, height)?)
    }

    fn cuMemsetD2D32_v2 / cuMemsetD2D32_v2_ptds(at: Address, pitch: usize, value: u32, width: usize, height: usize) {
        fill_now(&fill_rows(at, pitch, value, 4, width, height)?)
    }

    fn cuMemsetD2D8Async / cuMemsetD2D8Async_ptsz(
        at: Address,
        pitch: usize,
        value: u8,
        width: usize,
        height: usize,
        stream: Handle,
    ) {
        fill_in_order(&fill_rows(at, pitch, u32::from(value), 1, width, height)?, stream)
    }

    fn cuMemsetD2D16Async / cuMemsetD2D16Async_ptsz(
        at: Address,
        pitch: usize,
        value: u16,
        width: usize,
        height: usize,
        stream: Handle,
    ) {
        fill_in_order(&fill_rows(at, pitch, u32::from(value), 2, width, height)?, stream)
    }

    fn cuMemsetD2D32Async / cuMemsetD2D32Async_ptsz(
        at: Address,
        pitch: usize,
        value: u32,
        width: usize,
        height: usize,
        stream: Handle,
    ) {
        fill_in_order(&fill_rows(at, pitch, value, 4, width, height)?, stream)
    }

    // All devices share the host's memory, so a prefetch moves nothing but keeps its place in the stream.
    fn cuMemPrefetchAsync / cuMemPrefetchAsync_ptsz(at: Address, bytes: usize, _device: i32, stream: Handle) {
        memory::check(at, bytes)?;
        stream::issue(&stream::find(stream)?, Work::Empty).map(drop)
    }

    fn cuMemPrefetchAsync_v2 / cuMemPrefetchAsync_v2_ptsz(
        at: Address,
        bytes: usize,
        _location: u64,
        _flags: u32,
        stream: Handle,
    ) {
        memory::check(at, bytes)?;
        stream::issue(&stream::find(stream)?, Work::Empty).map(drop)
    }
}

/// A copy on the default stream that the host waits for.
fn copy_now(destination: Address, source: Address, bytes: usize) -> Result<(), Code> {
    boxed_now(Copy::linear(destination, source, bytes))
}

fn boxed_now(copy: Copy) -> Result<(), Code> {
    let stream = stream::find(0)?;
    capture::refuse_unsafe()?;
    if let Some(marker) = stream::issue(&stream, Work::Copy(copy))? {
        marker.wait();
    }
    Ok(())
}

/// Issues a copy to a stream. As in the driver, the call reads a pageable source before it returns (the application may reuse it),
/// and waits for a copy to a pageable destination.
fn copy_in_order(destination: Address, source: Address, bytes: usize, stream: Handle) -> Result<(), Code> {
    let stream = stream::find(stream)?;
    let copy = Copy::linear(destination, source, bytes);
    if stream.is_capturing() || bytes == 0 {
        return stream::issue(&stream, Work::Copy(copy)).map(drop);
    }
    if memory::is_pageable(destination)? {
        let marker = stream::issue(&stream, Work::Copy(copy))?;
        marker.iter().for_each(|marker| marker.wait());
        return Ok(());
    }
    if memory::is_pageable(source)? {
        if stream.role == context::Role::Legacy {
            capture::refuse_legacy(&stream.context)?;
        }
        let mut staging = vec![0_u8; bytes];
        Work::Copy(Copy::linear(staging.as_mut_ptr() as usize, source, bytes)).run(None);
        stream.submit(move || {
            Work::Copy(Copy::linear(destination, staging.as_ptr() as usize, bytes)).run(None)
        });
        return Ok(());
    }
    stream::issue(&stream, Work::Copy(copy)).map(drop)
}

fn check_peers(
    destination: Address,
    destination_context: Handle,
    source: Address,
    source_context: Handle,
    bytes: usize,
) -> Result<(), Code> {
    context::find_or_current(destination_context)?;
    context::find_or_current(source_context)?;
    memory::check(destination, bytes)?;
    memory::check(source, bytes)
}

fn fill(destination: Address, value: u32, element_bytes: usize, count: usize) -> Result<Fill, Code> {
    fill_rows(destination, 0, value, element_bytes, count, 1)
}

/// Makes a fill after the driver's checks: alignment, and that the rows are known memory.
pub fn fill_rows(
    destination: Address,
    pitch: usize,
    value: u32,
    element_bytes: usize,
    width: usize,
    height: usize,
) -> Result<Fill, Code> {
    let row = width.checked_mul(element_bytes).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let known_width = matches!(element_bytes, 1 | 2 | 4);
    if !known_width || !destination.is_multiple_of(element_bytes) || (height > 1 && pitch < row) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let bytes = pitch.checked_mul(height.saturating_sub(1)).and_then(|rows| rows.checked_add(row));
    memory::check(destination, if height == 0 { 0 } else { bytes.ok_or(CUDA_ERROR_INVALID_VALUE)? })?;
    Ok(Fill { destination, pitch, value, element_bytes, width, height })
}

/// A fill by one of the driver's "synchronous" functions, which return before a fill of device memory is done.
fn fill_now(fill: &Fill) -> Result<(), Code> {
    capture::refuse_unsafe()?;
    fill_in_order(fill, 0)
}

fn fill_in_order(fill: &Fill, stream: Handle) -> Result<(), Code> {
    stream::issue(&stream::find(stream)?, Work::Fill(*fill)).map(drop)
}

/// The address of one side of a 2D or 3D copy: host, device or unified memory. Arrays are not supported.
fn side(memory_type: u32, host: Address, device: Address) -> Result<Address, Code> {
    match memory_type {
        1 => Ok(host),
        2 | 4 => Ok(device),
        3 => Err(CUDA_ERROR_NOT_SUPPORTED),
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

impl Copy2D {
    fn plan(&self) -> Result<Copy, Code> {
        let from = side(self.source_type, self.source_host, self.source_device)?;
        let to = side(self.destination_type, self.destination_host, self.destination_device)?;
        Ok(Copy {
            source: from + self.source_y * self.source_pitch + self.source_x,
            source_pitch: self.source_pitch,
            source_slice: 0,
            destination: to + self.destination_y * self.destination_pitch + self.destination_x,
            destination_pitch: self.destination_pitch,
            destination_slice: 0,
            width: self.width,
            height: self.height,
            depth: 1,
        })
    }
}

impl Copy3D {
    pub fn plan(&self) -> Result<Copy, Code> {
        let from = side(self.source_type, self.source_host, self.source_device)?;
        let to = side(self.destination_type, self.destination_host, self.destination_device)?;
        let source_slice = self.source_pitch * self.source_height;
        let destination_slice = self.destination_pitch * self.destination_height;
        Ok(Copy {
            source: from + self.source_z * source_slice + self.source_y * self.source_pitch + self.source_x,
            source_pitch: self.source_pitch,
            source_slice,
            destination: to
                + self.destination_z * destination_slice
                + self.destination_y * self.destination_pitch
                + self.destination_x,
            destination_pitch: self.destination_pitch,
            destination_slice,
            width: self.width,
            height: self.height,
            depth: self.depth,
        })
    }
}
