//! Lets an entry point call Rust code and then jump to the function that the code has chosen.

/// Makes a naked function through which a call passes. It keeps all argument registers while it calls one Rust function. Then it jumps
/// to the address in `r11`, with the stack as it came.
///
/// `before` sets the Rust function's arguments; `after` puts the address into `r11`. The macro leaves the first argument's
/// register to them, since it may change: its place is `[rsp + 128]`. The other five follow it. The caller's return address is
/// at `[rsp + 200]`, and stack arguments are behind it.
#[macro_export]
macro_rules! trampoline {
    ($(#[$attribute:meta])* $visibility:vis fn $name:ident calls $called:ident,
     before [$($before:literal),*], after [$($after:literal),*]) => {
        $(#[$attribute])*
        #[unsafe(naked)]
        $visibility unsafe extern "C" fn $name() {
            ::core::arch::naked_asm!(
                // The frame is described, so that unwinders and debuggers in the Rust function see the caller.
                ".cfi_startproc",
                // The call pushed 8 bytes; 200 more align the stack for the next call.
                "sub rsp, 200",
                ".cfi_adjust_cfa_offset 200",
                "movups [rsp], xmm0",
                "movups [rsp + 16], xmm1",
                "movups [rsp + 32], xmm2",
                "movups [rsp + 48], xmm3",
                "movups [rsp + 64], xmm4",
                "movups [rsp + 80], xmm5",
                "movups [rsp + 96], xmm6",
                "movups [rsp + 112], xmm7",
                "mov [rsp + 136], rsi",
                "mov [rsp + 144], rdx",
                "mov [rsp + 152], rcx",
                "mov [rsp + 160], r8",
                "mov [rsp + 168], r9",
                $($before,)*
                "call {called}",
                $($after,)*
                "movups xmm0, [rsp]",
                "movups xmm1, [rsp + 16]",
                "movups xmm2, [rsp + 32]",
                "movups xmm3, [rsp + 48]",
                "movups xmm4, [rsp + 64]",
                "movups xmm5, [rsp + 80]",
                "movups xmm6, [rsp + 96]",
                "movups xmm7, [rsp + 112]",
                "mov rsi, [rsp + 136]",
                "mov rdx, [rsp + 144]",
                "mov rcx, [rsp + 152]",
                "mov r8, [rsp + 160]",
                "mov r9, [rsp + 168]",
                "add rsp, 200",
                ".cfi_adjust_cfa_offset -200",
                "jmp r11",
                ".cfi_endproc",
                called = sym $called,
            )
        }
    };
}
