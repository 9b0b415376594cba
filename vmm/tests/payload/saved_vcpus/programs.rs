//! Programs that set up state, wait, and use that state. They work at any address, in 64-bit mode.
//!
//! A program reads port 0x700 until it reads 0xaa, then goes on; it ends with a write to port 0x701. Results are at
//! 0x200000.

use std::arch::global_asm;

/// The bytes between two labels of the assembly below.
macro_rules! program {
    ($name:ident, $start:ident, $end:ident) => {
        pub fn $name() -> Vec<u8> {
            unsafe extern "C" {
                static $start: u8;
                static $end: u8;
            }
            let (start, end) = (&raw const $start, &raw const $end);
            // SAFETY: the labels enclose bytes of this binary that nothing writes.
            unsafe { std::slice::from_raw_parts(start, end as usize - start as usize) }.to_vec()
        }
    };
}

program!(registers, registers_start, registers_end);
program!(deadline, deadline_start, deadline_end);
program!(pending_interrupt, interrupt_start, interrupt_end);
program!(pending_nmi, nmi_start, nmi_end);
program!(start_other, start_other_start, start_other_end);

global_asm!(
    r#"
    .pushsection .rodata

    // Waits for the test.
    .macro wait_for_go
        mov dx, 0x700
    9:  in al, dx
        cmp al, 0xaa
        jne 9b
    .endm

    // Ends the program.
    .macro finish
        mov dx, 0x701
        mov al, 1
        out dx, al
    8:  hlt
        jmp 8b
    .endm

    // An IDT at 0x210000 whose gate of `vector` leads to `handler`, and a stack.
    .macro gate vector, handler
        mov rsp, 0x208000
        lea rax, [rip + \handler]
        mov edi, 0x210000 + 16 * \vector
        mov [rdi], ax
        mov word ptr [rdi + 2], 0x10
        mov word ptr [rdi + 4], 0x8e00
        shr rax, 16
        mov [rdi + 6], ax
        shr rax, 16
        mov [rdi + 8], eax
        mov edi, 0x20ff00
        mov word ptr [rdi], 0xfff
        mov qword ptr [rdi + 2], 0x210000
        lidt [rdi]
    .endm

    // Enables the local APIC, at [rbx].
    .macro enable_apic
        mov ebx, 0xfee00000
        mov dword ptr [rbx + 0xf0], 0x1ff
    .endm

    .macro write_msr number
        mov ecx, \number
        mov rdx, rax
        shr rdx, 32
        wrmsr
    .endm

    .macro store_msr number, offset
        mov ecx, \number
        rdmsr
        shl rdx, 32
        or rax, rdx
        mov [rdi + \offset], rax
    .endm

    // An XMM register, general registers, DR0, DR7, KERNEL_GS_BASE, LSTAR, a variable MTRR, CR8.
    registers_start:
        mov rax, cr0
        and eax, 0xfffffffb
        or eax, 2
        mov cr0, rax
        mov rax, cr4
        or eax, 0x600
        mov cr4, rax
        movdqu xmm3, xmmword ptr [rip + 5f]
        mov rax, 0x123456789abc
        mov dr0, rax
        mov eax, 0xd0602
        mov dr7, rax
        mov rax, 0xffff800012345678
        write_msr 0xc0000102
        mov rax, 0xffff800087654321
        write_msr 0xc0000082
        mov eax, 0x80000006
        write_msr 0x200
        mov eax, 5
        mov cr8, rax
        mov r15, 0x1122334455667788
        mov rbp, 0x8877665544332211
        wait_for_go
        mov edi, 0x200000
        movdqu [rdi], xmm3
        mov [rdi + 16], r15
        mov [rdi + 24], rbp
        mov rax, dr0
        mov [rdi + 32], rax
        mov rax, dr7
        mov [rdi + 40], rax
        store_msr 0xc0000102, 48
        store_msr 0xc0000082, 56
        store_msr 0x200, 64
        mov rax, cr8
        mov [rdi + 72], rax
        finish
    5:  .byte 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16
    registers_end:

    // Arms the TSC deadline 2^29 ticks ahead and halts. The handler stores the deadline and its own time.
    deadline_start:
        enable_apic
        gate 0x40, 6f
        mov dword ptr [rbx + 0x320], 0x40040
        rdtsc
        shl rdx, 32
        or rax, rdx
        add rax, 0x20000000
        mov r12, rax
        write_msr 0x6e0
        mov dx, 0x700
        in al, dx
    5:  sti
        hlt
        jmp 5b
    6:  rdtsc
        shl rdx, 32
        or rax, rdx
        mov edi, 0x200000
        mov [rdi], r12
        mov [rdi + 8], rax
        finish
    deadline_end:

    // Sends itself vector 0x41 while interrupts are off, and takes it after the wait.
    interrupt_start:
        cli
        enable_apic
        gate 0x41, 6f
        mov dword ptr [rbx + 0x300], 0x40041
        wait_for_go
        mov edi, 0x200000
        mov qword ptr [rdi], 1
        sti
    5:  jmp 5b
    6:  mov edi, 0x200000
        mov qword ptr [rdi + 8], 0x41
        finish
    interrupt_end:

    // Sends itself a second NMI in the handler of the first, where it stays pending until IRET.
    nmi_start:
        cli
        enable_apic
        gate 2, 6f
        xor r12d, r12d
        mov dword ptr [rbx + 0x300], 0x40400
    5:  jmp 5b
    6:  inc r12d
        cmp r12d, 1
        jne 7f
        mov dword ptr [rbx + 0x300], 0x40400
        wait_for_go
        iretq
    7:  mov edi, 0x200000
        mov qword ptr [rdi + 8], 0x4e
        finish
    nmi_end:

    // Sends INIT to the other vCPU, and SIPI after the wait, for real-mode code at 0x3000.
    start_other_start:
        enable_apic
        lea rsi, [rip + 5f]
        mov edi, 0x3000
        mov ecx, 32
        rep movsb
        mov dword ptr [rbx + 0x310], 0x01000000
        mov dword ptr [rbx + 0x300], 0x4500
        wait_for_go
        mov dword ptr [rbx + 0x310], 0x01000000
        mov dword ptr [rbx + 0x300], 0x4603
    6:  hlt
        jmp 6b
        .code16
    5:  mov dx, 0x701
        mov al, 1
        out dx, al
    7:  hlt
        jmp 7b
        .code64
        .skip 32
    start_other_end:

    .popsection
"#
);
