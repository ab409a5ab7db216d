; ModuleID = '<string>'
source_filename = "LLVMDialectModule"
target datalayout = "e-m:e-p270:32:32-p271:32:32-p272:64:64-i64:64-i128:128-f80:128-n8:16:32:64-S128"
target triple = "x86_64-unknown-linux-gnu"

@wyfast_live = internal unnamed_addr global ptr null

; Function Attrs: nounwind
define void @gram(ptr readnone captures(none) %0, ptr readnone captures(none) %1, i64 %2, i64 %3, i64 %4, ptr readnone captures(none) %5, ptr readnone captures(none) %6, i64 %7, i64 %8, i64 %9, ptr %10, ptr %11, i64 %12, i64 %13, i64 %14, ptr %15, ptr %16, i64 %17, i64 %18, i64 %19, i32 %20, i32 %21, i32 %22, i32 %23, i32 %24, i32 %25, i32 %26) local_unnamed_addr #0 {
  %block.i = tail call dereferenceable_or_null(16464) ptr @malloc(i64 16464)
  %failed.i = icmp eq ptr %block.i, null
  br i1 %failed.i, label %full.i, label %link.i

full.i:                                           ; preds = %27
  tail call void @abort()
  unreachable

link.i:                                           ; preds = %27
  %head.i = load ptr, ptr @wyfast_live, align 8
  store ptr null, ptr %block.i, align 8
  %next.i = getelementptr i8, ptr %block.i, i64 8
  store ptr %head.i, ptr %next.i, align 8
  %first.i = icmp eq ptr %head.i, null
  br i1 %first.i, label %wyfast_malloc.exit, label %back.i

back.i:                                           ; preds = %link.i
  store ptr %block.i, ptr %head.i, align 8
  br label %wyfast_malloc.exit

wyfast_malloc.exit:                               ; preds = %link.i, %back.i
  store ptr %block.i, ptr @wyfast_live, align 8
  %user.i = getelementptr i8, ptr %block.i, i64 16
  %28 = ptrtoint ptr %user.i to i64
  %29 = add i64 %28, 63
  %30 = and i64 %29, -64
  %31 = inttoptr i64 %30 to ptr
  tail call void @llvm.memset.p0.i64(ptr noundef nonnull align 64 dereferenceable(16384) %31, i8 0, i64 16384, i1 false)
  %32 = shl i32 %24, 6
  %33 = sext i32 %32 to i64
  %34 = shl nsw i64 %33, 7
  %block.i62 = tail call dereferenceable_or_null(16400) ptr @malloc(i64 16400)
  %failed.i63 = icmp eq ptr %block.i62, null
  br i1 %failed.i63, label %full.i70, label %wyfast_malloc.exit71

full.i70:                                         ; preds = %wyfast_malloc.exit
  tail call void @abort()
  unreachable

wyfast_malloc.exit71:                             ; preds = %wyfast_malloc.exit
  store ptr null, ptr %block.i62, align 8
  %next.i66 = getelementptr i8, ptr %block.i62, i64 8
  store ptr %block.i, ptr %next.i66, align 8
  store ptr %block.i62, ptr %block.i, align 8
  store ptr %block.i62, ptr @wyfast_live, align 8
  %user.i69 = getelementptr i8, ptr %block.i62, i64 16
  %35 = add nsw i64 %33, 64
  %36 = tail call i32 @llvm.smax.i32(i32 %32, i32 %20)
  %37 = sext i32 %36 to i64
  %38 = tail call i64 @llvm.smin.i64(i64 %35, i64 %37)
  %39 = sub nsw i64 %38, %33
  %40 = icmp slt i64 %39, 64
  br i1 %40, label %.preheader135.preheader, label %.loopexit

.preheader135.preheader:                          ; preds = %wyfast_malloc.exit71
  tail call void @llvm.memset.p0.i64(ptr noundef nonnull align 2 dereferenceable(16384) %user.i69, i8 0, i64 16384, i1 false)
  br label %.loopexit

.loopexit:                                        ; preds = %.preheader135.preheader, %wyfast_malloc.exit71
  %41 = tail call ptr @llvm.stacksave.p0()
  %42 = alloca { ptr, ptr, i64, [2 x i64], [2 x i64] }, align 8
  store ptr %10, ptr %42, align 8
  %.repack4 = getelementptr inbounds nuw i8, ptr %42, i64 8
  store ptr %11, ptr %.repack4, align 8
  %.repack6 = getelementptr inbounds nuw i8, ptr %42, i64 16
  store i64 %34, ptr %.repack6, align 8
  %.repack8 = getelementptr inbounds nuw i8, ptr %42, i64 24
  store i64 %39, ptr %.repack8, align 8
  %.repack8.repack12 = getelementptr inbounds nuw i8, ptr %42, i64 32
  store i64 128, ptr %.repack8.repack12, align 8
  %.repack10 = getelementptr inbounds nuw i8, ptr %42, i64 40
  store i64 128, ptr %.repack10, align 8
  %.repack10.repack14 = getelementptr inbounds nuw i8, ptr %42, i64 48
  store i64 1, ptr %.repack10.repack14, align 8
  %43 = alloca { ptr, ptr, i64, [2 x i64], [2 x i64] }, align 8
  store ptr %user.i69, ptr %43, align 8
  %.repack15 = getelementptr inbounds nuw i8, ptr %43, i64 8
  store ptr %user.i69, ptr %.repack15, align 8
  %.repack17 = getelementptr inbounds nuw i8, ptr %43, i64 16
  store i64 0, ptr %.repack17, align 8
  %.repack19 = getelementptr inbounds nuw i8, ptr %43, i64 24
  store i64 %39, ptr %.repack19, align 8
  %.repack19.repack23 = getelementptr inbounds nuw i8, ptr %43, i64 32
  store i64 128, ptr %.repack19.repack23, align 8
  %.repack21 = getelementptr inbounds nuw i8, ptr %43, i64 40
  store i64 128, ptr %.repack21, align 8
  %.repack21.repack25 = getelementptr inbounds nuw i8, ptr %43, i64 48
  store i64 1, ptr %.repack21.repack25, align 8
  %fbytes.i = shl nsw i64 %33, 8
  %f.i = getelementptr i8, ptr %11, i64 %fbytes.i
  call fastcc void @wyfast_copy(i64 2, i64 2, ptr %f.i, ptr %user.i69, ptr nonnull %.repack8, ptr nonnull %.repack10, ptr nonnull %.repack21)
  call void @llvm.stackrestore.p0(ptr %41)
  %block.i72 = tail call dereferenceable_or_null(16464) ptr @malloc(i64 16464)
  %failed.i73 = icmp eq ptr %block.i72, null
  br i1 %failed.i73, label %full.i80, label %link.i74

full.i80:                                         ; preds = %.loopexit
  tail call void @abort()
  unreachable

link.i74:                                         ; preds = %.loopexit
  %head.i75 = load ptr, ptr @wyfast_live, align 8
  store ptr null, ptr %block.i72, align 8
  %next.i76 = getelementptr i8, ptr %block.i72, i64 8
  store ptr %head.i75, ptr %next.i76, align 8
  %first.i77 = icmp eq ptr %head.i75, null
  br i1 %first.i77, label %wyfast_malloc.exit81, label %back.i78

back.i78:                                         ; preds = %link.i74
  store ptr %block.i72, ptr %head.i75, align 8
  br label %wyfast_malloc.exit81

wyfast_malloc.exit81:                             ; preds = %link.i74, %back.i78
  store ptr %block.i72, ptr @wyfast_live, align 8
  %user.i79 = getelementptr i8, ptr %block.i72, i64 16
  %44 = ptrtoint ptr %user.i79 to i64
  %45 = add i64 %44, 63
  %46 = and i64 %45, -64
  %47 = inttoptr i64 %46 to ptr
  %scevgep = getelementptr i8, ptr %47, i64 16384
  %scevgep144 = getelementptr nuw i8, ptr %block.i62, i64 16400
  %bound0 = icmp ugt ptr %scevgep144, %47
  %bound1 = icmp ult ptr %user.i69, %scevgep
  %found.conflict = and i1 %bound0, %bound1
  br label %.preheader134

.preheader134:                                    ; preds = %wyfast_malloc.exit81, %middle.block
  %48 = phi i64 [ 0, %wyfast_malloc.exit81 ], [ %121, %middle.block ]
  %invariant.gep = getelementptr bfloat, ptr %user.i69, i64 %48
  %.idx59 = shl i64 %48, 7
  %49 = getelementptr i8, ptr %47, i64 %.idx59
  br i1 %found.conflict, label %scalar.ph, label %vector.body

vector.body:                                      ; preds = %.preheader134, %vector.body
  %index = phi i64 [ %index.next, %vector.body ], [ 0, %.preheader134 ]
  %vec.ind = phi <16 x i64> [ %vec.ind.next, %vector.body ], [ <i64 0, i64 1, i64 2, i64 3, i64 4, i64 5, i64 6, i64 7, i64 8, i64 9, i64 10, i64 11, i64 12, i64 13, i64 14, i64 15>, %.preheader134 ]
  %50 = shl nuw nsw <16 x i64> %vec.ind, splat (i64 8)
  %51 = extractelement <16 x i64> %50, i64 0
  %52 = extractelement <16 x i64> %50, i64 1
  %53 = extractelement <16 x i64> %50, i64 2
  %54 = extractelement <16 x i64> %50, i64 3
  %55 = extractelement <16 x i64> %50, i64 4
  %56 = extractelement <16 x i64> %50, i64 5
  %57 = extractelement <16 x i64> %50, i64 6
  %58 = extractelement <16 x i64> %50, i64 7
  %59 = extractelement <16 x i64> %50, i64 8
  %60 = extractelement <16 x i64> %50, i64 9
  %61 = extractelement <16 x i64> %50, i64 10
  %62 = extractelement <16 x i64> %50, i64 11
  %63 = extractelement <16 x i64> %50, i64 12
  %64 = extractelement <16 x i64> %50, i64 13
  %65 = extractelement <16 x i64> %50, i64 14
  %66 = extractelement <16 x i64> %50, i64 15
  %67 = getelementptr i8, ptr %invariant.gep, i64 %51
  %68 = getelementptr i8, ptr %invariant.gep, i64 %52
  %69 = getelementptr i8, ptr %invariant.gep, i64 %53
  %70 = getelementptr i8, ptr %invariant.gep, i64 %54
  %71 = getelementptr i8, ptr %invariant.gep, i64 %55
  %72 = getelementptr i8, ptr %invariant.gep, i64 %56
  %73 = getelementptr i8, ptr %invariant.gep, i64 %57
  %74 = getelementptr i8, ptr %invariant.gep, i64 %58
  %75 = getelementptr i8, ptr %invariant.gep, i64 %59
  %76 = getelementptr i8, ptr %invariant.gep, i64 %60
  %77 = getelementptr i8, ptr %invariant.gep, i64 %61
  %78 = getelementptr i8, ptr %invariant.gep, i64 %62
  %79 = getelementptr i8, ptr %invariant.gep, i64 %63
  %80 = getelementptr i8, ptr %invariant.gep, i64 %64
  %81 = getelementptr i8, ptr %invariant.gep, i64 %65
  %82 = getelementptr i8, ptr %invariant.gep, i64 %66
  %83 = load bfloat, ptr %67, align 2, !alias.scope !1
  %84 = load bfloat, ptr %68, align 2, !alias.scope !1
  %85 = load bfloat, ptr %69, align 2, !alias.scope !1
  %86 = load bfloat, ptr %70, align 2, !alias.scope !1
  %87 = load bfloat, ptr %71, align 2, !alias.scope !1
  %88 = load bfloat, ptr %72, align 2, !alias.scope !1
  %89 = load bfloat, ptr %73, align 2, !alias.scope !1
  %90 = load bfloat, ptr %74, align 2, !alias.scope !1
  %91 = load bfloat, ptr %75, align 2, !alias.scope !1
  %92 = load bfloat, ptr %76, align 2, !alias.scope !1
  %93 = load bfloat, ptr %77, align 2, !alias.scope !1
  %94 = load bfloat, ptr %78, align 2, !alias.scope !1
  %95 = load bfloat, ptr %79, align 2, !alias.scope !1
  %96 = load bfloat, ptr %80, align 2, !alias.scope !1
  %97 = load bfloat, ptr %81, align 2, !alias.scope !1
  %98 = load bfloat, ptr %82, align 2, !alias.scope !1
  %99 = insertelement <16 x bfloat> poison, bfloat %83, i64 0
  %100 = insertelement <16 x bfloat> %99, bfloat %84, i64 1
  %101 = insertelement <16 x bfloat> %100, bfloat %85, i64 2
  %102 = insertelement <16 x bfloat> %101, bfloat %86, i64 3
  %103 = insertelement <16 x bfloat> %102, bfloat %87, i64 4
  %104 = insertelement <16 x bfloat> %103, bfloat %88, i64 5
  %105 = insertelement <16 x bfloat> %104, bfloat %89, i64 6
  %106 = insertelement <16 x bfloat> %105, bfloat %90, i64 7
  %107 = insertelement <16 x bfloat> %106, bfloat %91, i64 8
  %108 = insertelement <16 x bfloat> %107, bfloat %92, i64 9
  %109 = insertelement <16 x bfloat> %108, bfloat %93, i64 10
  %110 = insertelement <16 x bfloat> %109, bfloat %94, i64 11
  %111 = insertelement <16 x bfloat> %110, bfloat %95, i64 12
  %112 = insertelement <16 x bfloat> %111, bfloat %96, i64 13
  %113 = insertelement <16 x bfloat> %112, bfloat %97, i64 14
  %114 = insertelement <16 x bfloat> %113, bfloat %98, i64 15
  %115 = getelementptr bfloat, ptr %49, i64 %index
  store <16 x bfloat> %114, ptr %115, align 32, !alias.scope !4, !noalias !1
  %index.next = add nuw i64 %index, 16
  %vec.ind.next = add nuw nsw <16 x i64> %vec.ind, splat (i64 16)
  %116 = icmp eq i64 %index.next, 64
  br i1 %116, label %middle.block, label %vector.body, !llvm.loop !6

scalar.ph:                                        ; preds = %.preheader134, %scalar.ph
  %117 = phi i64 [ %120, %scalar.ph ], [ 0, %.preheader134 ]
  %.idx58 = shl nuw nsw i64 %117, 8
  %gep = getelementptr i8, ptr %invariant.gep, i64 %.idx58
  %118 = load bfloat, ptr %gep, align 2
  %119 = getelementptr bfloat, ptr %49, i64 %117
  store bfloat %118, ptr %119, align 2
  %120 = add nuw nsw i64 %117, 1
  %exitcond.not = icmp eq i64 %120, 64
  br i1 %exitcond.not, label %middle.block, label %scalar.ph, !llvm.loop !9

middle.block:                                     ; preds = %vector.body, %scalar.ph
  %121 = add nuw nsw i64 %48, 1
  %exitcond138.not = icmp eq i64 %121, 128
  br i1 %exitcond138.not, label %.preheader132.preheader, label %.preheader134

.preheader132.preheader:                          ; preds = %middle.block
  %scevgep150 = getelementptr i8, ptr %47, i64 16384
  br label %.preheader132

.preheader132:                                    ; preds = %.preheader132.preheader, %160
  %122 = phi i64 [ %161, %160 ], [ 0, %.preheader132.preheader ]
  %123 = shl nuw nsw i64 %122, 8
  %scevgep146 = getelementptr i8, ptr %31, i64 %123
  %124 = getelementptr i8, ptr %31, i64 %123
  %scevgep147 = getelementptr i8, ptr %124, i64 256
  %125 = getelementptr i8, ptr %block.i62, i64 %123
  %scevgep148 = getelementptr i8, ptr %125, i64 16
  %126 = getelementptr i8, ptr %block.i62, i64 %123
  %scevgep149 = getelementptr i8, ptr %126, i64 272
  %.idx = shl i64 %122, 8
  %127 = getelementptr i8, ptr %user.i69, i64 %.idx
  %128 = getelementptr i8, ptr %31, i64 %.idx
  %bound0151 = icmp ult ptr %scevgep146, %scevgep149
  %bound1152 = icmp ult ptr %scevgep148, %scevgep147
  %found.conflict153 = and i1 %bound0151, %bound1152
  %bound0154 = icmp ult ptr %scevgep146, %scevgep150
  %bound1155 = icmp ugt ptr %scevgep147, %47
  %found.conflict156 = and i1 %bound0154, %bound1155
  %conflict.rdx = or i1 %found.conflict153, %found.conflict156
  br label %.preheader

.preheader:                                       ; preds = %.preheader132, %middle.block163
  %129 = phi i64 [ 0, %.preheader132 ], [ %159, %middle.block163 ]
  %130 = getelementptr bfloat, ptr %127, i64 %129
  %.idx56 = shl i64 %129, 7
  %131 = getelementptr i8, ptr %47, i64 %.idx56
  br i1 %conflict.rdx, label %scalar.ph157, label %vector.ph158

vector.ph158:                                     ; preds = %.preheader
  %132 = load i16, ptr %130, align 2, !alias.scope !10
  %broadcast.splatinsert = insertelement <8 x i16> poison, i16 %132, i64 0
  %broadcast.splat = shufflevector <8 x i16> %broadcast.splatinsert, <8 x i16> poison, <8 x i32> zeroinitializer
  %133 = zext <8 x i16> %broadcast.splat to <8 x i32>
  %134 = shl nuw <8 x i32> %133, splat (i32 16)
  %135 = bitcast <8 x i32> %134 to <8 x float>
  br label %vector.body159

vector.body159:                                   ; preds = %vector.body159, %vector.ph158
  %index160 = phi i64 [ 0, %vector.ph158 ], [ %index.next162, %vector.body159 ]
  %136 = getelementptr bfloat, ptr %131, i64 %index160
  %wide.load = load <8 x i16>, ptr %136, align 16, !alias.scope !13
  %137 = getelementptr float, ptr %128, i64 %index160
  %wide.load161 = load <8 x float>, ptr %137, align 32, !alias.scope !15, !noalias !17
  %138 = zext <8 x i16> %wide.load to <8 x i32>
  %139 = shl nuw <8 x i32> %138, splat (i32 16)
  %140 = bitcast <8 x i32> %139 to <8 x float>
  %141 = fmul <8 x float> %135, %140
  %142 = fadd <8 x float> %wide.load161, %141
  store <8 x float> %142, ptr %137, align 32, !alias.scope !15, !noalias !17
  %index.next162 = add nuw i64 %index160, 8
  %143 = icmp eq i64 %index.next162, 64
  br i1 %143, label %middle.block163, label %vector.body159, !llvm.loop !18

scalar.ph157:                                     ; preds = %.preheader, %scalar.ph157
  %144 = phi i64 [ %158, %scalar.ph157 ], [ 0, %.preheader ]
  %145 = load i16, ptr %130, align 2
  %146 = getelementptr bfloat, ptr %131, i64 %144
  %147 = load i16, ptr %146, align 2
  %148 = getelementptr float, ptr %128, i64 %144
  %149 = load float, ptr %148, align 4
  %150 = zext i16 %145 to i32
  %151 = shl nuw i32 %150, 16
  %152 = bitcast i32 %151 to float
  %153 = zext i16 %147 to i32
  %154 = shl nuw i32 %153, 16
  %155 = bitcast i32 %154 to float
  %156 = fmul float %152, %155
  %157 = fadd float %149, %156
  store float %157, ptr %148, align 4
  %158 = add nuw nsw i64 %144, 1
  %exitcond139.not = icmp eq i64 %158, 64
  br i1 %exitcond139.not, label %middle.block163, label %scalar.ph157, !llvm.loop !19

middle.block163:                                  ; preds = %vector.body159, %scalar.ph157
  %159 = add nuw nsw i64 %129, 1
  %exitcond140.not = icmp eq i64 %159, 128
  br i1 %exitcond140.not, label %160, label %.preheader

160:                                              ; preds = %middle.block163
  %161 = add nuw nsw i64 %122, 1
  %exitcond141.not = icmp eq i64 %161, 64
  br i1 %exitcond141.not, label %162, label %.preheader132

162:                                              ; preds = %160
  %163 = shl nsw i64 %33, 6
  %164 = tail call ptr @llvm.stacksave.p0()
  %165 = alloca { ptr, ptr, i64, [2 x i64], [2 x i64] }, align 8
  store ptr %user.i, ptr %165, align 8
  %.repack30 = getelementptr inbounds nuw i8, ptr %165, i64 8
  store ptr %31, ptr %.repack30, align 8
  %.repack32 = getelementptr inbounds nuw i8, ptr %165, i64 16
  store i64 0, ptr %.repack32, align 8
  %.repack34 = getelementptr inbounds nuw i8, ptr %165, i64 24
  store i64 %39, ptr %.repack34, align 8
  %.repack34.repack38 = getelementptr inbounds nuw i8, ptr %165, i64 32
  store i64 64, ptr %.repack34.repack38, align 8
  %.repack36 = getelementptr inbounds nuw i8, ptr %165, i64 40
  store i64 64, ptr %.repack36, align 8
  %.repack36.repack40 = getelementptr inbounds nuw i8, ptr %165, i64 48
  store i64 1, ptr %.repack36.repack40, align 8
  %166 = alloca { ptr, ptr, i64, [2 x i64], [2 x i64] }, align 8
  store ptr %15, ptr %166, align 8
  %.repack41 = getelementptr inbounds nuw i8, ptr %166, i64 8
  store ptr %16, ptr %.repack41, align 8
  %.repack43 = getelementptr inbounds nuw i8, ptr %166, i64 16
  store i64 %163, ptr %.repack43, align 8
  %.repack45 = getelementptr inbounds nuw i8, ptr %166, i64 24
  store i64 %39, ptr %.repack45, align 8
  %.repack45.repack49 = getelementptr inbounds nuw i8, ptr %166, i64 32
  store i64 64, ptr %.repack45.repack49, align 8
  %.repack47 = getelementptr inbounds nuw i8, ptr %166, i64 40
  store i64 64, ptr %.repack47, align 8
  %.repack47.repack51 = getelementptr inbounds nuw i8, ptr %166, i64 48
  store i64 1, ptr %.repack47.repack51, align 8
  %t.i98 = getelementptr i8, ptr %16, i64 %fbytes.i
  call fastcc void @wyfast_copy(i64 2, i64 4, ptr nonnull %31, ptr %t.i98, ptr nonnull %.repack34, ptr nonnull %.repack36, ptr nonnull %.repack47)
  call void @llvm.stackrestore.p0(ptr %164)
  %nothing.i = icmp eq ptr %user.i, null
  br i1 %nothing.i, label %wyfast_free.exit, label %unlink.i

unlink.i:                                         ; preds = %162
  %prev.i = load ptr, ptr %block.i, align 8
  %next.i104 = load ptr, ptr %next.i, align 8
  %isfirst.i = icmp eq ptr %prev.i, null
  %prevnext.i = getelementptr i8, ptr %prev.i, i64 8
  %slot.i = select i1 %isfirst.i, ptr @wyfast_live, ptr %prevnext.i
  store ptr %next.i104, ptr %slot.i, align 8
  %islast.i = icmp eq ptr %next.i104, null
  br i1 %islast.i, label %release.i, label %back.i105

back.i105:                                        ; preds = %unlink.i
  store ptr %prev.i, ptr %next.i104, align 8
  br label %release.i

release.i:                                        ; preds = %back.i105, %unlink.i
  tail call void @free(ptr nonnull %block.i)
  br label %wyfast_free.exit

wyfast_free.exit:                                 ; preds = %162, %release.i
  %nothing.i106 = icmp eq ptr %user.i69, null
  br i1 %nothing.i106, label %wyfast_free.exit118, label %unlink.i107

unlink.i107:                                      ; preds = %wyfast_free.exit
  %prev.i110 = load ptr, ptr %block.i62, align 8
  %next.i111 = load ptr, ptr %next.i66, align 8
  %isfirst.i112 = icmp eq ptr %prev.i110, null
  %prevnext.i113 = getelementptr i8, ptr %prev.i110, i64 8
  %slot.i114 = select i1 %isfirst.i112, ptr @wyfast_live, ptr %prevnext.i113
  store ptr %next.i111, ptr %slot.i114, align 8
  %islast.i115 = icmp eq ptr %next.i111, null
  br i1 %islast.i115, label %release.i117, label %back.i116

back.i116:                                        ; preds = %unlink.i107
  store ptr %prev.i110, ptr %next.i111, align 8
  br label %release.i117

release.i117:                                     ; preds = %back.i116, %unlink.i107
  tail call void @free(ptr nonnull %block.i62)
  br label %wyfast_free.exit118

wyfast_free.exit118:                              ; preds = %wyfast_free.exit, %release.i117
  %nothing.i119 = icmp eq ptr %user.i79, null
  br i1 %nothing.i119, label %wyfast_free.exit131, label %unlink.i120

unlink.i120:                                      ; preds = %wyfast_free.exit118
  %prev.i123 = load ptr, ptr %block.i72, align 8
  %next.i124 = load ptr, ptr %next.i76, align 8
  %isfirst.i125 = icmp eq ptr %prev.i123, null
  %prevnext.i126 = getelementptr i8, ptr %prev.i123, i64 8
  %slot.i127 = select i1 %isfirst.i125, ptr @wyfast_live, ptr %prevnext.i126
  store ptr %next.i124, ptr %slot.i127, align 8
  %islast.i128 = icmp eq ptr %next.i124, null
  br i1 %islast.i128, label %release.i130, label %back.i129

back.i129:                                        ; preds = %unlink.i120
  store ptr %prev.i123, ptr %next.i124, align 8
  br label %release.i130

release.i130:                                     ; preds = %back.i129, %unlink.i120
  tail call void @free(ptr nonnull %block.i72)
  br label %wyfast_free.exit131

wyfast_free.exit131:                              ; preds = %wyfast_free.exit118, %release.i130
  ret void
}

; Function Attrs: mustprogress nocallback nofree nosync nounwind willreturn
declare ptr @llvm.stacksave.p0() #1

; Function Attrs: mustprogress nocallback nofree nosync nounwind willreturn
declare void @llvm.stackrestore.p0(ptr) #1

; Function Attrs: nofree nounwind
define noundef ptr @wyfast_malloc(i64 %bytes) local_unnamed_addr #2 {
  %total = add i64 %bytes, 16
  %block = tail call ptr @malloc(i64 %total)
  %failed = icmp eq ptr %block, null
  br i1 %failed, label %full, label %link

full:                                             ; preds = %0
  tail call void @abort()
  unreachable

link:                                             ; preds = %0
  %head = load ptr, ptr @wyfast_live, align 8
  store ptr null, ptr %block, align 8
  %next = getelementptr i8, ptr %block, i64 8
  store ptr %head, ptr %next, align 8
  %first = icmp eq ptr %head, null
  br i1 %first, label %done, label %back

back:                                             ; preds = %link
  store ptr %block, ptr %head, align 8
  br label %done

done:                                             ; preds = %back, %link
  store ptr %block, ptr @wyfast_live, align 8
  %user = getelementptr i8, ptr %block, i64 16
  ret ptr %user
}

; Function Attrs: mustprogress nofree nounwind willreturn allockind("alloc,uninitialized") allocsize(0) memory(inaccessiblemem: readwrite)
declare noalias noundef ptr @malloc(i64 noundef) local_unnamed_addr #3

; Function Attrs: cold nofree noreturn nounwind
declare void @abort() local_unnamed_addr #4

; Function Attrs: mustprogress nounwind willreturn memory(write, argmem: readwrite, inaccessiblemem: readwrite, target_mem0: none, target_mem1: none)
define void @wyfast_free(ptr captures(address_is_null) %user) local_unnamed_addr #5 {
  %nothing = icmp eq ptr %user, null
  br i1 %nothing, label %done, label %unlink

unlink:                                           ; preds = %0
  %block = getelementptr i8, ptr %user, i64 -16
  %nextp = getelementptr i8, ptr %user, i64 -8
  %prev = load ptr, ptr %block, align 8
  %next = load ptr, ptr %nextp, align 8
  %isfirst = icmp eq ptr %prev, null
  %prevnext = getelementptr i8, ptr %prev, i64 8
  %slot = select i1 %isfirst, ptr @wyfast_live, ptr %prevnext
  store ptr %next, ptr %slot, align 8
  %islast = icmp eq ptr %next, null
  br i1 %islast, label %release, label %back

back:                                             ; preds = %unlink
  store ptr %prev, ptr %next, align 8
  br label %release

release:                                          ; preds = %back, %unlink
  tail call void @free(ptr %block)
  br label %done

done:                                             ; preds = %release, %0
  ret void
}

; Function Attrs: mustprogress nounwind willreturn allockind("free") memory(argmem: readwrite, inaccessiblemem: readwrite)
declare void @free(ptr allocptr noundef captures(none)) local_unnamed_addr #6

; Function Attrs: nounwind memory(readwrite, target_mem0: none, target_mem1: none)
define i64 @wyfast_release() local_unnamed_addr #7 {
entry:
  %head1 = load ptr, ptr @wyfast_live, align 8
  %empty2 = icmp eq ptr %head1, null
  br i1 %empty2, label %done, label %one

one:                                              ; preds = %entry, %wyfast_free.exit
  %head5 = phi ptr [ %head, %wyfast_free.exit ], [ %head1, %entry ]
  %count3 = phi i64 [ %more, %wyfast_free.exit ], [ 0, %entry ]
  %user = getelementptr i8, ptr %head5, i64 16
  %nothing.i = icmp eq ptr %user, null
  br i1 %nothing.i, label %wyfast_free.exit, label %unlink.i

unlink.i:                                         ; preds = %one
  %nextp.i = getelementptr i8, ptr %head5, i64 8
  %prev.i = load ptr, ptr %head5, align 8
  %next.i = load ptr, ptr %nextp.i, align 8
  %isfirst.i = icmp eq ptr %prev.i, null
  %prevnext.i = getelementptr i8, ptr %prev.i, i64 8
  %slot.i = select i1 %isfirst.i, ptr @wyfast_live, ptr %prevnext.i
  store ptr %next.i, ptr %slot.i, align 8
  %islast.i = icmp eq ptr %next.i, null
  br i1 %islast.i, label %release.i, label %back.i

back.i:                                           ; preds = %unlink.i
  store ptr %prev.i, ptr %next.i, align 8
  br label %release.i

release.i:                                        ; preds = %back.i, %unlink.i
  tail call void @free(ptr nonnull %head5)
  %head.pre = load ptr, ptr @wyfast_live, align 8
  br label %wyfast_free.exit

wyfast_free.exit:                                 ; preds = %one, %release.i
  %head = phi ptr [ %head5, %one ], [ %head.pre, %release.i ]
  %more = add i64 %count3, 1
  %empty = icmp eq ptr %head, null
  br i1 %empty, label %done, label %one

done:                                             ; preds = %wyfast_free.exit, %entry
  %count.lcssa = phi i64 [ 0, %entry ], [ %more, %wyfast_free.exit ]
  ret i64 %count.lcssa
}

; Function Attrs: nofree nosync nounwind memory(readwrite, inaccessiblemem: none, target_mem0: none, target_mem1: none)
define void @memrefCopy(i64 %size, ptr readonly captures(none) %from, ptr readonly captures(none) %to) local_unnamed_addr #8 {
  %rank = load i64, ptr %from, align 4
  %fromp = getelementptr i8, ptr %from, i64 8
  %top = getelementptr i8, ptr %to, i64 8
  %fd = load ptr, ptr %fromp, align 8
  %td = load ptr, ptr %top, align 8
  %fap = getelementptr i8, ptr %fd, i64 8
  %tap = getelementptr i8, ptr %td, i64 8
  %fa = load ptr, ptr %fap, align 8
  %ta = load ptr, ptr %tap, align 8
  %fop = getelementptr i8, ptr %fd, i64 16
  %top2 = getelementptr i8, ptr %td, i64 16
  %fo = load i64, ptr %fop, align 8
  %to2 = load i64, ptr %top2, align 8
  %fbytes = mul i64 %fo, %size
  %tbytes = mul i64 %to2, %size
  %f = getelementptr i8, ptr %fa, i64 %fbytes
  %t = getelementptr i8, ptr %ta, i64 %tbytes
  %sizes = getelementptr i8, ptr %fd, i64 24
  %tsizes = getelementptr i8, ptr %td, i64 24
  %fstrides = getelementptr i64, ptr %sizes, i64 %rank
  %tstrides = getelementptr i64, ptr %tsizes, i64 %rank
  tail call fastcc void @wyfast_copy(i64 %rank, i64 %size, ptr %f, ptr %t, ptr %sizes, ptr %fstrides, ptr %tstrides)
  ret void
}

; Function Attrs: nofree nosync nounwind memory(argmem: readwrite)
define internal fastcc void @wyfast_copy(i64 %rank, i64 %size, ptr readonly captures(none) %f, ptr writeonly captures(none) %t, ptr readonly captures(none) %sizes, ptr readonly captures(none) %fs, ptr readonly captures(none) %ts) unnamed_addr #9 {
entry:
  %scalar = icmp eq i64 %rank, 0
  br i1 %scalar, label %common.ret.sink.split, label %axis

common.ret.sink.split:                            ; preds = %entry, %row
  %bytes.sink = phi i64 [ %bytes, %row ], [ %size, %entry ]
  tail call void @llvm.memcpy.p0.p0.i64(ptr align 1 %t, ptr align 1 %f, i64 %bytes.sink, i1 false)
  br label %common.ret

common.ret:                                       ; preds = %body, %common.ret.sink.split, %prepare
  ret void

axis:                                             ; preds = %entry
  %n = load i64, ptr %sizes, align 4
  %fstride = load i64, ptr %fs, align 4
  %tstride = load i64, ptr %ts, align 4
  %last = icmp eq i64 %rank, 1
  %fdense = icmp eq i64 %fstride, 1
  %tdense = icmp eq i64 %tstride, 1
  %dense1 = and i1 %fdense, %tdense
  %dense = and i1 %last, %dense1
  br i1 %dense, label %row, label %prepare

row:                                              ; preds = %axis
  %bytes = mul i64 %n, %size
  br label %common.ret.sink.split

prepare:                                          ; preds = %axis
  %fstep = mul i64 %fstride, %size
  %tstep = mul i64 %tstride, %size
  %rest = add i64 %rank, -1
  %sizes1 = getelementptr i8, ptr %sizes, i64 8
  %fs1 = getelementptr i8, ptr %fs, i64 8
  %ts1 = getelementptr i8, ptr %ts, i64 8
  %in1 = icmp sgt i64 %n, 0
  br i1 %in1, label %body, label %common.ret

body:                                             ; preds = %prepare, %body
  %ti4 = phi ptr [ %tnext, %body ], [ %t, %prepare ]
  %fi3 = phi ptr [ %fnext, %body ], [ %f, %prepare ]
  %i2 = phi i64 [ %i1, %body ], [ 0, %prepare ]
  tail call fastcc void @wyfast_copy(i64 %rest, i64 %size, ptr %fi3, ptr %ti4, ptr %sizes1, ptr %fs1, ptr %ts1)
  %fnext = getelementptr i8, ptr %fi3, i64 %fstep
  %tnext = getelementptr i8, ptr %ti4, i64 %tstep
  %i1 = add nuw nsw i64 %i2, 1
  %exitcond.not = icmp eq i64 %i1, %n
  br i1 %exitcond.not, label %common.ret, label %body
}

; Function Attrs: mustprogress nocallback nofree nounwind willreturn memory(argmem: readwrite)
declare void @llvm.memcpy.p0.p0.i64(ptr noalias writeonly captures(none), ptr noalias readonly captures(none), i64, i1 immarg) #10

; Function Attrs: mustprogress nofree norecurse nosync nounwind willreturn memory(none)
define bfloat @__truncsfbf2(float %x) local_unnamed_addr #11 {
  %bits = bitcast float %x to i32
  %high = lshr i32 %bits, 16
  %odd = and i32 %high, 1
  %half = add i32 %bits, 32767
  %up = add i32 %half, %odd
  %rounded = lshr i32 %up, 16
  %quiet = or i32 %high, 64
  %isnan = fcmp uno float %x, 0.000000e+00
  %chosen = select i1 %isnan, i32 %quiet, i32 %rounded
  %short = trunc nuw i32 %chosen to i16
  %result = bitcast i16 %short to bfloat
  ret bfloat %result
}

; Function Attrs: nounwind
define i64 @wyfast_launch(ptr readonly captures(none) %slots, i32 %gx, i32 %gy, i32 %gz) local_unnamed_addr #0 {
entry:
  %v0 = load ptr, ptr %slots, align 8
  %p1 = getelementptr i8, ptr %slots, i64 16
  %v1 = load ptr, ptr %p1, align 8
  %p2 = getelementptr i8, ptr %slots, i64 32
  %v2 = load i32, ptr %p2, align 8
  %gxy = mul i32 %gy, %gx
  %all = mul i32 %gxy, %gz
  %more1 = icmp sgt i32 %all, 0
  br i1 %more1, label %program, label %done

program:                                          ; preds = %entry, %wyfast_release.exit
  %left3 = phi i64 [ %sum, %wyfast_release.exit ], [ 0, %entry ]
  %i2 = phi i32 [ %next, %wyfast_release.exit ], [ 0, %entry ]
  %x = srem i32 %i2, %gx
  tail call void @gram(ptr poison, ptr poison, i64 poison, i64 poison, i64 poison, ptr poison, ptr poison, i64 poison, i64 poison, i64 poison, ptr %v0, ptr %v0, i64 poison, i64 poison, i64 poison, ptr %v1, ptr %v1, i64 poison, i64 poison, i64 poison, i32 %v2, i32 poison, i32 poison, i32 poison, i32 %x, i32 poison, i32 poison)
  %head1.i = load ptr, ptr @wyfast_live, align 8
  %empty2.i = icmp eq ptr %head1.i, null
  br i1 %empty2.i, label %wyfast_release.exit, label %one.i

one.i:                                            ; preds = %program, %wyfast_free.exit.i
  %head5.i = phi ptr [ %head.i, %wyfast_free.exit.i ], [ %head1.i, %program ]
  %count3.i = phi i64 [ %more.i, %wyfast_free.exit.i ], [ 0, %program ]
  %user.i = getelementptr i8, ptr %head5.i, i64 16
  %nothing.i.i = icmp eq ptr %user.i, null
  br i1 %nothing.i.i, label %wyfast_free.exit.i, label %unlink.i.i

unlink.i.i:                                       ; preds = %one.i
  %nextp.i.i = getelementptr i8, ptr %head5.i, i64 8
  %prev.i.i = load ptr, ptr %head5.i, align 8
  %next.i.i = load ptr, ptr %nextp.i.i, align 8
  %isfirst.i.i = icmp eq ptr %prev.i.i, null
  %prevnext.i.i = getelementptr i8, ptr %prev.i.i, i64 8
  %slot.i.i = select i1 %isfirst.i.i, ptr @wyfast_live, ptr %prevnext.i.i
  store ptr %next.i.i, ptr %slot.i.i, align 8
  %islast.i.i = icmp eq ptr %next.i.i, null
  br i1 %islast.i.i, label %release.i.i, label %back.i.i

back.i.i:                                         ; preds = %unlink.i.i
  store ptr %prev.i.i, ptr %next.i.i, align 8
  br label %release.i.i

release.i.i:                                      ; preds = %back.i.i, %unlink.i.i
  tail call void @free(ptr nonnull %head5.i)
  %head.pre.i = load ptr, ptr @wyfast_live, align 8
  br label %wyfast_free.exit.i

wyfast_free.exit.i:                               ; preds = %release.i.i, %one.i
  %head.i = phi ptr [ %head5.i, %one.i ], [ %head.pre.i, %release.i.i ]
  %more.i = add i64 %count3.i, 1
  %empty.i = icmp eq ptr %head.i, null
  br i1 %empty.i, label %wyfast_release.exit, label %one.i

wyfast_release.exit:                              ; preds = %wyfast_free.exit.i, %program
  %count.lcssa.i = phi i64 [ 0, %program ], [ %more.i, %wyfast_free.exit.i ]
  %sum = add i64 %count.lcssa.i, %left3
  %next = add nuw nsw i32 %i2, 1
  %exitcond.not = icmp eq i32 %next, %all
  br i1 %exitcond.not, label %done, label %program

done:                                             ; preds = %wyfast_release.exit, %entry
  %left.lcssa = phi i64 [ 0, %entry ], [ %sum, %wyfast_release.exit ]
  ret i64 %left.lcssa
}

; Function Attrs: nocallback nocreateundeforpoison nofree nosync nounwind speculatable willreturn memory(none)
declare i32 @llvm.smax.i32(i32, i32) #12

; Function Attrs: nocallback nocreateundeforpoison nofree nosync nounwind speculatable willreturn memory(none)
declare i64 @llvm.smin.i64(i64, i64) #12

; Function Attrs: nocallback nofree nounwind willreturn memory(argmem: write)
declare void @llvm.memset.p0.i64(ptr writeonly captures(none), i8, i64, i1 immarg) #13

attributes #0 = { nounwind }
attributes #1 = { mustprogress nocallback nofree nosync nounwind willreturn }
attributes #2 = { nofree nounwind }
attributes #3 = { mustprogress nofree nounwind willreturn allockind("alloc,uninitialized") allocsize(0) memory(inaccessiblemem: readwrite) "alloc-family"="malloc" }
attributes #4 = { cold nofree noreturn nounwind }
attributes #5 = { mustprogress nounwind willreturn memory(write, argmem: readwrite, inaccessiblemem: readwrite, target_mem0: none, target_mem1: none) }
attributes #6 = { mustprogress nounwind willreturn allockind("free") memory(argmem: readwrite, inaccessiblemem: readwrite) "alloc-family"="malloc" }
attributes #7 = { nounwind memory(readwrite, target_mem0: none, target_mem1: none) }
attributes #8 = { nofree nosync nounwind memory(readwrite, inaccessiblemem: none, target_mem0: none, target_mem1: none) }
attributes #9 = { nofree nosync nounwind memory(argmem: readwrite) }
attributes #10 = { mustprogress nocallback nofree nounwind willreturn memory(argmem: readwrite) }
attributes #11 = { mustprogress nofree norecurse nosync nounwind willreturn memory(none) }
attributes #12 = { nocallback nocreateundeforpoison nofree nosync nounwind speculatable willreturn memory(none) }
attributes #13 = { nocallback nofree nounwind willreturn memory(argmem: write) }

!llvm.module.flags = !{!0}

!0 = !{i32 2, !"Debug Info Version", i32 3}
!1 = !{!2}
!2 = distinct !{!2, !3}
!3 = distinct !{!3, !"LVerDomain"}
!4 = !{!5}
!5 = distinct !{!5, !3}
!6 = distinct !{!6, !7, !8}
!7 = !{!"llvm.loop.isvectorized", i32 1}
!8 = !{!"llvm.loop.unroll.runtime.disable"}
!9 = distinct !{!9, !7}
!10 = !{!11}
!11 = distinct !{!11, !12}
!12 = distinct !{!12, !"LVerDomain"}
!13 = !{!14}
!14 = distinct !{!14, !12}
!15 = !{!16}
!16 = distinct !{!16, !12}
!17 = !{!11, !14}
!18 = distinct !{!18, !7, !8}
!19 = distinct !{!19, !7}
