// The kernel of `gather.cu` as PTX, which a driver compiles for its device. Made by scripts/make-gather-kernel.
//
// What it is: text. What it is not: for a device older than Volta, or a driver before CUDA 10: such a driver refuses it, and copies
// are made one by one.
#pragma once

namespace kvpool {

inline constexpr const char* GATHER_NAME = "gather";
inline constexpr const char* GATHER_KERNEL = R"ptx(
.version 6.3
.target sm_70
.address_size 64
.visible .entry gather(
.param .u64 gather_param_0,
.param .u32 gather_param_1
)
{
.reg .pred %p<25>;
.reg .b16 %rs<6>;
.reg .b32 %r<45>;
.reg .b64 %rd<118>;
ld.param.u64 %rd64, [gather_param_0];
ld.param.u32 %r5, [gather_param_1];
mov.u32 %r44, %ctaid.x;
setp.ge.u32 %p1, %r44, %r5;
@%p1 bra $L__BB0_32;
mov.u32 %r6, %tid.x;
cvt.u64.u32 %rd1, %r6;
mov.u32 %r2, %nctaid.x;
mov.u32 %r7, %ntid.x;
cvt.u64.u32 %rd2, %r7;
mul.wide.u32 %rd3, %r6, 16;
mul.wide.u32 %rd4, %r7, 64;
mul.wide.u32 %rd5, %r7, 16;
mul.wide.u32 %rd6, %r6, 4;
mul.wide.u32 %rd8, %r7, 4;
cvta.to.global.u64 %rd9, %rd64;
$L__BB0_2:
mul.wide.u32 %rd65, %r44, 24;
add.s64 %rd66, %rd9, %rd65;
ld.global.u64 %rd10, [%rd66+16];
ld.global.u64 %rd11, [%rd66+8];
ld.global.u64 %rd12, [%rd66];
xor.b64 %rd13, %rd11, %rd12;
and.b64 %rd67, %rd13, 15;
setp.eq.s64 %p2, %rd67, 0;
@%p2 bra $L__BB0_19;
and.b64 %rd68, %rd13, 3;
setp.eq.s64 %p3, %rd68, 0;
@%p3 bra $L__BB0_7;
setp.le.u64 %p4, %rd10, %rd1;
@%p4 bra $L__BB0_31;
mov.u64 %rd109, %rd1;
$L__BB0_6:
.pragma "nounroll";
add.s64 %rd69, %rd11, %rd109;
ld.u8 %rs1, [%rd69];
add.s64 %rd70, %rd12, %rd109;
st.u8 [%rd70], %rs1;
add.s64 %rd109, %rd109, %rd2;
setp.lt.u64 %p5, %rd109, %rd10;
@%p5 bra $L__BB0_6;
bra.uni $L__BB0_31;
$L__BB0_19:
neg.s64 %rd90, %rd12;
and.b64 %rd91, %rd90, 15;
min.u64 %rd40, %rd91, %rd10;
sub.s64 %rd41, %rd10, %rd40;
shr.u64 %rd42, %rd41, 4;
setp.le.u64 %p15, %rd40, %rd1;
@%p15 bra $L__BB0_22;
mov.u64 %rd114, %rd1;
$L__BB0_21:
.pragma "nounroll";
add.s64 %rd92, %rd11, %rd114;
ld.u8 %rs4, [%rd92];
add.s64 %rd93, %rd12, %rd114;
st.u8 [%rd93], %rs4;
add.s64 %rd114, %rd114, %rd2;
setp.lt.u64 %p16, %rd114, %rd40;
@%p16 bra $L__BB0_21;
$L__BB0_22:
setp.le.u64 %p17, %rd42, %rd1;
@%p17 bra $L__BB0_28;
add.s64 %rd45, %rd40, %rd11;
add.s64 %rd46, %rd40, %rd12;
mov.u64 %rd115, 0;
mov.u64 %rd116, %rd1;
$L__BB0_24:
.pragma "nounroll";
mul.lo.s64 %rd95, %rd4, %rd115;
add.s64 %rd49, %rd3, %rd95;
add.s64 %rd96, %rd45, %rd49;
ld.v4.u32 {%r12, %r13, %r14, %r15}, [%rd96];
add.s64 %rd97, %rd46, %rd49;
st.v4.u32 [%rd97], {%r12, %r13, %r14, %r15};
add.s64 %rd52, %rd116, %rd2;
setp.ge.u64 %p18, %rd52, %rd42;
@%p18 bra $L__BB0_28;
add.s64 %rd53, %rd5, %rd49;
add.s64 %rd98, %rd45, %rd53;
ld.v4.u32 {%r20, %r21, %r22, %r23}, [%rd98];
add.s64 %rd99, %rd46, %rd53;
st.v4.u32 [%rd99], {%r20, %r21, %r22, %r23};
add.s64 %rd54, %rd52, %rd2;
setp.ge.u64 %p19, %rd54, %rd42;
@%p19 bra $L__BB0_28;
add.s64 %rd55, %rd5, %rd53;
add.s64 %rd100, %rd45, %rd55;
ld.v4.u32 {%r28, %r29, %r30, %r31}, [%rd100];
add.s64 %rd101, %rd46, %rd55;
st.v4.u32 [%rd101], {%r28, %r29, %r30, %r31};
add.s64 %rd56, %rd54, %rd2;
setp.ge.u64 %p20, %rd56, %rd42;
@%p20 bra $L__BB0_28;
add.s64 %rd102, %rd5, %rd55;
add.s64 %rd103, %rd45, %rd102;
ld.v4.u32 {%r36, %r37, %r38, %r39}, [%rd103];
add.s64 %rd104, %rd46, %rd102;
st.v4.u32 [%rd104], {%r36, %r37, %r38, %r39};
add.s64 %rd116, %rd56, %rd2;
setp.lt.u64 %p21, %rd116, %rd42;
add.s64 %rd115, %rd115, 1;
@%p21 bra $L__BB0_24;
$L__BB0_28:
and.b64 %rd105, %rd41, -16;
or.b64 %rd106, %rd105, %rd40;
add.s64 %rd59, %rd106, %rd12;
add.s64 %rd60, %rd106, %rd11;
sub.s64 %rd61, %rd10, %rd106;
setp.le.u64 %p22, %rd61, %rd1;
@%p22 bra $L__BB0_31;
mov.u64 %rd117, %rd1;
$L__BB0_30:
.pragma "nounroll";
add.s64 %rd107, %rd60, %rd117;
ld.u8 %rs5, [%rd107];
add.s64 %rd108, %rd59, %rd117;
st.u8 [%rd108], %rs5;
add.s64 %rd117, %rd117, %rd2;
setp.lt.u64 %p23, %rd117, %rd61;
@%p23 bra $L__BB0_30;
bra.uni $L__BB0_31;
$L__BB0_7:
neg.s64 %rd71, %rd12;
and.b64 %rd72, %rd71, 3;
min.u64 %rd16, %rd72, %rd10;
sub.s64 %rd17, %rd10, %rd16;
shr.u64 %rd18, %rd17, 2;
setp.le.u64 %p6, %rd16, %rd1;
@%p6 bra $L__BB0_10;
mov.u64 %rd110, %rd1;
$L__BB0_9:
.pragma "nounroll";
add.s64 %rd73, %rd11, %rd110;
ld.u8 %rs2, [%rd73];
add.s64 %rd74, %rd12, %rd110;
st.u8 [%rd74], %rs2;
add.s64 %rd110, %rd110, %rd2;
setp.lt.u64 %p7, %rd110, %rd16;
@%p7 bra $L__BB0_9;
$L__BB0_10:
setp.le.u64 %p8, %rd18, %rd1;
@%p8 bra $L__BB0_16;
add.s64 %rd21, %rd16, %rd11;
add.s64 %rd22, %rd16, %rd12;
mov.u64 %rd111, 0;
mov.u64 %rd112, %rd1;
$L__BB0_12:
.pragma "nounroll";
mul.lo.s64 %rd76, %rd5, %rd111;
add.s64 %rd25, %rd6, %rd76;
add.s64 %rd77, %rd21, %rd25;
ld.u32 %r8, [%rd77];
add.s64 %rd78, %rd22, %rd25;
st.u32 [%rd78], %r8;
add.s64 %rd28, %rd112, %rd2;
setp.ge.u64 %p9, %rd28, %rd18;
@%p9 bra $L__BB0_16;
add.s64 %rd29, %rd8, %rd25;
add.s64 %rd79, %rd21, %rd29;
ld.u32 %r9, [%rd79];
add.s64 %rd80, %rd22, %rd29;
st.u32 [%rd80], %r9;
add.s64 %rd30, %rd28, %rd2;
setp.ge.u64 %p10, %rd30, %rd18;
@%p10 bra $L__BB0_16;
add.s64 %rd31, %rd8, %rd29;
add.s64 %rd81, %rd21, %rd31;
ld.u32 %r10, [%rd81];
add.s64 %rd82, %rd22, %rd31;
st.u32 [%rd82], %r10;
add.s64 %rd32, %rd30, %rd2;
setp.ge.u64 %p11, %rd32, %rd18;
@%p11 bra $L__BB0_16;
add.s64 %rd83, %rd8, %rd31;
add.s64 %rd84, %rd21, %rd83;
ld.u32 %r11, [%rd84];
add.s64 %rd85, %rd22, %rd83;
st.u32 [%rd85], %r11;
add.s64 %rd112, %rd32, %rd2;
setp.lt.u64 %p12, %rd112, %rd18;
add.s64 %rd111, %rd111, 1;
@%p12 bra $L__BB0_12;
$L__BB0_16:
and.b64 %rd86, %rd17, -4;
or.b64 %rd87, %rd86, %rd16;
add.s64 %rd35, %rd87, %rd12;
add.s64 %rd36, %rd87, %rd11;
sub.s64 %rd37, %rd10, %rd87;
setp.le.u64 %p13, %rd37, %rd1;
@%p13 bra $L__BB0_31;
mov.u64 %rd113, %rd1;
$L__BB0_18:
.pragma "nounroll";
add.s64 %rd88, %rd36, %rd113;
ld.u8 %rs3, [%rd88];
add.s64 %rd89, %rd35, %rd113;
st.u8 [%rd89], %rs3;
add.s64 %rd113, %rd113, %rd2;
setp.lt.u64 %p14, %rd113, %rd37;
@%p14 bra $L__BB0_18;
$L__BB0_31:
add.s32 %r44, %r44, %r2;
setp.lt.u32 %p24, %r44, %r5;
@%p24 bra $L__BB0_2;
$L__BB0_32:
ret;
}
)ptx";

}  // namespace kvpool
